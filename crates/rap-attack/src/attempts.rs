//! All attempts, by topic.

mod arrivals;
mod callbacks;
mod callers;
mod connections;
mod credentials;
mod direction;
mod discovery;
mod events;
mod files;
mod local;
mod mcp;
mod models;
mod people;
mod requests;
mod responses;
mod shipped;
mod users;
mod validation;
mod web_interface;

use crate::attempt::Attempt;

pub(crate) fn all() -> Vec<Attempt> {
    let topics = [
        callbacks::all,
        requests::all,
        local::all,
        connections::all,
        responses::all,
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
        web_interface::all,
        arrivals::all,
        shipped::all,
        mcp::all,
    ];
    topics.into_iter().flat_map(|topic| topic()).collect()
}

/// Position of an attempt among all.
pub(crate) fn position(name: &str) -> Option<usize> {
    all().iter().position(|attempt| attempt.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_of_attempts_are_unique() {
        let attempts = all();
        let names: BTreeSet<&str> = attempts.iter().map(|attempt| attempt.name).collect();
        assert_eq!(names.len(), attempts.len());
    }
}
