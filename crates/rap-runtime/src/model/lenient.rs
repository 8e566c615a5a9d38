//! Reads values that servers send in different types. An answer is not discarded because of an odd value that it does not
//! depend on.

use serde_json::Value;

/// Returns a number of tokens, or the position of a call: a number that is not negative, also as a float or as text.
pub(super) fn count(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => number.as_u64().or_else(|| float(number.as_f64()?)),
        Value::String(text) => text.trim().parse().ok().or_else(|| float(text.trim().parse().ok()?)),
        _ => None,
    }
}

/// Converts a float. The largest ones become `u64::MAX`.
fn float(number: f64) -> Option<u64> {
    (number.is_finite() && number >= 0.0).then(|| number.round() as u64)
}

/// Returns the text of a string or a number, without NUL characters. For any other value the text is empty.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => without_nul(text),
        Value::Number(number) => number.to_string(),
        _ => String::new(),
    }
}

/// Removes NUL characters, which neither tools nor databases accept.
pub(super) fn without_nul(text: &str) -> String {
    text.replace('\0', "")
}

/// Maximum length of the empty object that some servers send before the arguments of a call, with white space.
const PLACEHOLDER_BYTES: usize = 16;

/// Adds a piece to the text of a call's arguments. Some servers send `{}` before the real arguments.
pub(super) fn extend_arguments(arguments: &mut String, piece: &str) {
    let may_be_placeholder = arguments.len() <= PLACEHOLDER_BYTES;
    if may_be_placeholder && arguments.trim() == "{}" && !piece.trim().is_empty() {
        arguments.clear();
    }
    arguments.push_str(piece);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_are_read_in_every_form() {
        let table = [
            (json!(7), Some(7)),
            (json!(7.0), Some(7)),
            (json!("7"), Some(7)),
            (json!(" 7.2 "), Some(7)),
            (json!(1e300), Some(u64::MAX)),
            (json!(-1), None),
            (json!("-1"), None),
            (json!("NaN"), None),
            (json!(null), None),
            (json!({}), None),
        ];
        for (value, expected) in table {
            assert_eq!(count(&value), expected, "{value}");
        }
    }

    #[test]
    fn an_empty_object_before_the_arguments_is_replaced() {
        let joined = |pieces: &[&str]| {
            let mut arguments = String::new();
            pieces.iter().for_each(|piece| extend_arguments(&mut arguments, piece));
            arguments
        };
        assert_eq!(joined(&["{}", "{\"a\":", "1}"]), "{\"a\":1}");
        assert_eq!(joined(&["{", "}"]), "{}");
        assert_eq!(joined(&["{}", "", "\n"]), "{}\n");
    }
}
