//! Limits are read as their table says.

use std::time::Duration;

use rap_agent::{Limit, LimitValue, Valid};

use super::Setup;
use crate::config::{Config, Limits};

/// Checks that each limit is read from the configuration, with a value that is not its default.
fn check_limits<L>(table: &[Limit<L>], of: impl Fn(&Config) -> &L) {
    for limit in table {
        let (text, expected) = match &limit.valid {
            Valid::Count(_) | Valid::CountOrNone => ("3".to_owned(), LimitValue::Number(3)),
            Valid::Size(range) => {
                let size = *range.start().max(&2048);
                (size.to_string(), LimitValue::Number(size))
            }
            Valid::Duration | Valid::DurationAboveZero | Valid::DurationOrNone => {
                ("\"3m\"".to_owned(), LimitValue::Duration(Duration::from_mins(3)))
            }
        };
        let config = Setup::new(&format!("[limits]\n{} = {text}", limit.key)).config();
        assert_eq!((limit.get)(of(&config)), expected, "{}", limit.key);
        assert_ne!((limit.get)(of(&Config::default())), expected, "{}", limit.key);
    }
}

#[test]
fn every_limit_can_be_configured() {
    check_limits(rap_agent::Limits::TABLE, |config| &config.limits.thread);
    check_limits(Limits::TABLE, |config| &config.limits);
    for key in ["connections", "request_within", "stop_within"] {
        assert!(Limits::TABLE.iter().any(|limit| limit.key == key), "{key}");
    }
}

#[test]
fn the_former_key_of_a_limit_is_accepted_but_not_together_with_the_current_one() {
    let config = Setup::new("[limits]\nevent_marks_for = \"2d\"").config();
    assert_eq!(config.limits.idempotency_key_lifetime, Duration::from_hours(48));
    let both = "[limits]\nidempotency_key_lifetime = \"1d\"\nevent_marks_for = \"2d\"";
    let mistakes = Setup::new(both).error();
    assert_eq!(mistakes, "rap.toml:3: limits.event_marks_for: already used at rap.toml:2");
}
