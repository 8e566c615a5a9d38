//! Conformance checks for any implementation of the Reactive Agent Protocol. They use only its network interfaces.
//!
//! A *probe* sends requests to the implementation and checks one behaviour. It passes, fails with the exchange that
//! shows the failure, or reports why nothing could be observed. Each probe names the requirements that it covers
//! ([`requirements`]). A [`Report`] lists the results by requirement, in the order of the specification.
//!
//! A requirement that cannot be observed from outside is never reported as passed, and one that can be observed in part
//! ([`Gap`]) is reported as such. [`Profile`] separates the specification from this project's interpretation of it. This crate does not write to the
//! terminal.

mod canary;
pub mod report;
pub mod requirements;
pub mod runtime;
pub mod tool;

pub use report::{
    Exchange, Extent, Gap, Outcome, Probe, Profile, Progress, RedactedMessage, Report, RequirementResult,
    Strictness, Subject, Verdict, Weight,
};
