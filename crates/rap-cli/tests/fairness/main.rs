//! Fairness: a thread, a session or a server that loops, floods, hangs or fails delays only itself.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod floods;
mod loops;
mod model_slots;
mod servers;
mod stage;
mod toolset_versions;
