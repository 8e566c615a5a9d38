//! The probes of a tool server, by what they are about.

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

/// What is found in one stage is known in the next.
pub(super) const STAGES: &[&[&[Check]]] = &[
    &[discovery::CHECKS],
    &[calls::FIRST],
    &[
        calls::CHECKS,
        errors::CHECKS,
        delivery::CHECKS,
        identity::CHECKS,
        notifications::CHECKS,
        subscriptions::CHECKS,
        authentication::CHECKS,
    ],
    &[identity::CROWD, subscriptions::SPARED_BY_CANCELLING],
    &[subscriptions::SPARED_BY_CLOSING],
    // It uses up what the server grants us.
    &[flood::CHECKS],
];
