//! Conformance checks for any implementation of the Reactive Agent Protocol. They use only its network interfaces.
//!
//! A *probe* sends requests to the implementation and checks one behaviour. It passes, fails with the exchange that
//! shows the failure, or reports why nothing could be observed. Each probe names the requirements that it covers
//! ([`requirements`]). A [`Report`] lists the results by requirement, in the order of the specification.
//!
//! [`Profile`] separates the specification from this project's interpretation of it. This crate does not write to the
//! terminal.
//!
//! # Invariants
//!
//! - C1 Each requirement has a probe, a gap that says what cannot be observed, or both. It passes only if all its
//!   probes passed and there is no gap; if some passed and none failed, the result is partial. Each row says what was
//!   seen.
//! - C2 If a probe cannot run because something earlier failed, it is reported as *not observable*, so that one mistake
//!   causes one failure.
//! - C3 It shares only `rap-protocol` and the HTTP code of `rap-io` with our implementations, and reads responses
//!   leniently except where a probe is about their form.
//! - C4 Exchanges in the report are redacted: URLs end after the host, and the bearer token is removed.
//! - C5 It calls only operations that a flag names or that are annotated `readOnly`, and uses only its own threads, ids
//!   and files.
//! - C6 Every wait has a bound. A message is taken to be absent after two seconds (tool servers) or `--quiet-period`,
//!   three seconds by default (runtimes).
//! - C7 MUST and SHOULD have separate probes where they can be told apart. A point that the specification leaves open
//!   is an *addition*: a probe without requirements, which runs only in the profile `rap`.

mod canary;
pub mod report;
pub mod requirements;
pub mod runtime;
pub mod tool;

pub use report::{
    Exchange, Extent, Gap, Outcome, Probe, Profile, Progress, RedactedMessage, Report, RequirementResult,
    Strictness, Subject, Verdict, Weight,
};
