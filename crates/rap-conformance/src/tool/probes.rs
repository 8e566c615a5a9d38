//! The probes of a tool server, by topic.

mod authentication;
mod calls;
mod delivery;
mod discovery;
mod errors;
mod flood;
mod identity;
mod notifications;
mod subscriptions;

use super::Check;

/// Rounds run one after the other. The probes of one round run concurrently and may use what earlier rounds found.
pub(super) const ROUNDS: &[&[&[Check]]] = &[
    &[discovery::CHECKS],
    &[calls::FIRST],
    &[notifications::FIRST],
    &[
        calls::CHECKS,
        errors::CHECKS,
        delivery::CHECKS,
        identity::CHECKS,
        notifications::CHECKS,
        subscriptions::CHECKS,
        authentication::CHECKS,
    ],
    &[identity::CONCURRENT, subscriptions::OTHERS_AFTER_CANCELLATION],
    &[subscriptions::OTHERS_AFTER_CLOSING],
    // The flood uses up the server's rate limit.
    &[flood::CHECKS],
];
