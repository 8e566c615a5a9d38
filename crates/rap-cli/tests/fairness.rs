//! Fairness: a thread, a session or a server that loops, floods, hangs or fails delays only itself.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

#[path = "fairness/loops.rs"]
mod loops;
#[path = "fairness/model_slots.rs"]
mod model_slots;
#[path = "fairness/servers.rs"]
mod servers;
#[path = "fairness/stage.rs"]
mod stage;
mod support;
#[path = "fairness/toolset_versions.rs"]
mod toolset_versions;
