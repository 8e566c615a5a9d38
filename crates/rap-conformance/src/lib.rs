//! Checks any implementation of the Reactive Agent Protocol, requirement by requirement, from outside.
//!
//! A *probe* is one observation: it speaks to the implementation, looks at what comes back, and passes, fails
//! with the exchange that shows it, or says why it could not observe anything. It names the requirements that
//! it is about ([`requirements`]). A [`Report`] puts what the probes saw in the order of the specification.
//!
//! What can not be observed from outside is never reported as passed. Nothing here touches a terminal.

pub mod report;
pub mod requirements;
pub mod runtime;
pub mod tool;

pub use report::{Exchange, Outcome, Probe, Progress, Report, Shown, Standing, Strictness, Subject, Verdict};
