//! All attempts, by topic.

mod answers;
mod callbacks;
mod callers;
mod connections;
mod credentials;
mod direction;
mod discovery;
mod events;
mod files;
mod local;
mod models;
mod people;
mod requests;
mod users;
mod validation;

use crate::attempt::Attempt;

/// Names of attempts whose defence is not built yet. They are shown as pending and run with `--pending` only.
pub(crate) const PENDING: &[&str] = &[
    "results of one batch without a bound",
    "discovery that hangs or drips",
    "one caller takes all calls",
    "one caller takes all delivery slots",
    "one caller names many dead hosts",
    "one caller asks about another's calls",
    "flood of events to one subscription",
    "invisible characters in output",
    "approval that hides an argument",
    "a user's token reaches for other users' threads",
    "a token does more than its scope",
    "Idempotency-Key of another client",
];

pub(crate) fn all() -> Vec<Attempt> {
    let topics = [
        callbacks::all,
        requests::all,
        local::all,
        connections::all,
        answers::all,
        validation::all,
        discovery::all,
        callers::all,
        events::all,
        models::all,
        direction::all,
        credentials::all,
        people::all,
        files::all,
        users::all,
    ];
    topics.into_iter().flat_map(|topic| topic()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_of_attempts_are_unique_and_every_pending_one_exists() {
        let attempts = all();
        let names: BTreeSet<&str> = attempts.iter().map(|attempt| attempt.name).collect();
        assert_eq!(names.len(), attempts.len());
        for pending in PENDING {
            assert!(names.contains(pending), "{pending}");
        }
    }
}
