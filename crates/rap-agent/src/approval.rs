//! Question to a person whether a call may be sent.
//!
//! Every argument is named. A long value is cut on its own, so that no value can hide another one, and the number of bytes
//! that are not shown is given outside of the quotes, where no argument can forge it. Tools have no influence on this text:
//! their display scripts are not run for calls that need an approval.

use std::io;

use rap_protocol::visible;
use serde_json::{Map, Value};

/// Length of all values of a question, in bytes. The values of an object get equal parts of its length.
const ALL_BYTES: usize = 16 * 1024;
/// Length to which an array or object is cut, in bytes.
const CONTAINER_BYTES: usize = 2 * 1024;
/// Length to which a string is cut, in bytes.
const STRING_BYTES: usize = 512;
/// Length to which a name is cut, in bytes.
const NAME_BYTES: usize = 64;
/// Maximum number of names of one object.
const NAMES: usize = 100;
/// Minimum length of a value that is cut. An array or object with less than this for each of its items shows fewer items.
const LEAST_BYTES: usize = 32;
/// Nesting of arrays and objects up to which the names within a long value are shown.
const DEPTH: usize = 4;

/// Returns the question whether a call with these arguments may be sent.
pub fn approval_prompt(tool: &str, arguments: &Map<String, Value>) -> String {
    let mut shown = String::new();
    show_object(&mut shown, arguments, ALL_BYTES, 0);
    format!("Allow {tool}({})?", visible::text(&shown))
}

fn show_value(out: &mut String, value: &Value, room: usize, depth: usize) {
    let room = room.clamp(LEAST_BYTES, CONTAINER_BYTES);
    match value {
        Value::String(text) => show_string(out, text, room.min(STRING_BYTES)),
        Value::Array(_) | Value::Object(_) if size(value) <= room => out.push_str(&value.to_string()),
        Value::Array(items) if depth < DEPTH => show_array(out, items, room, depth),
        Value::Object(fields) if depth < DEPTH => show_object(out, fields, room, depth),
        Value::Array(_) => out.push_str(&format!("[…] ({} bytes not shown)", size(value))),
        Value::Object(_) => out.push_str(&format!("{{…}} ({} bytes not shown)", size(value))),
        Value::Null | Value::Bool(_) | Value::Number(_) => out.push_str(&value.to_string()),
    }
}

fn show_object(out: &mut String, fields: &Map<String, Value>, room: usize, depth: usize) {
    let shown = fields.len().min(NAMES).min((room / (NAME_BYTES + LEAST_BYTES)).max(1));
    out.push('{');
    for (index, (name, value)) in fields.iter().take(shown).enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        show_string(out, name, NAME_BYTES);
        out.push(':');
        show_value(out, value, room / shown, depth + 1);
    }
    let rest = fields.iter().skip(shown).map(|(name, value)| name.len() + size(value));
    show_rest(out, "names", fields.len() - shown, rest.sum());
    out.push('}');
}

fn show_array(out: &mut String, items: &[Value], room: usize, depth: usize) {
    let shown = items.len().min((room / LEAST_BYTES).max(1));
    out.push('[');
    for (index, item) in items.iter().take(shown).enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        show_value(out, item, room / shown, depth + 1);
    }
    show_rest(out, "items", items.len() - shown, items.iter().skip(shown).map(size).sum());
    out.push(']');
}

fn show_rest(out: &mut String, what: &str, count: usize, bytes: usize) {
    if count > 0 {
        out.push_str(&format!(",… ({count} {what} with {bytes} bytes not shown)"));
    }
}

fn show_string(out: &mut String, text: &str, room: usize) {
    let shown = &text[..text.floor_char_boundary(room)];
    out.push_str(&Value::from(shown).to_string());
    if shown.len() < text.len() {
        out.push_str(&format!("… ({} bytes not shown)", text.len() - shown.len()));
    }
}

/// Size of a value as JSON, in bytes.
fn size(value: &Value) -> usize {
    struct Counter(usize);

    impl io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut counter = Counter(0);
    serde_json::to_writer(&mut counter, value).expect("bug: a JSON value can be written");
    counter.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn prompt(arguments: Value) -> String {
        let Value::Object(arguments) = arguments else { panic!("not an object") };
        approval_prompt("wipe", &arguments)
    }

    #[test]
    fn short_arguments_are_shown_whole() {
        assert_eq!(prompt(json!({})), "Allow wipe({})?");
        let arguments = json!({"disk": 1, "of": {"host": ["a", null]}, "text": "say \"hi\"\n"});
        assert_eq!(prompt(arguments.clone()), format!("Allow wipe({arguments})?"));
    }

    #[test]
    fn a_long_value_is_cut_on_its_own() {
        let shown = prompt(json!({"a": "x".repeat(1_000_000), "path": "/home", "z": "ü".repeat(400)}));
        let (x, u) = ("x".repeat(512), "ü".repeat(256));
        assert_eq!(
            shown,
            format!(
                "Allow wipe({{\"a\":\"{x}\"… (999488 bytes not shown),\"path\":\"/home\",\
                 \"z\":\"{u}\"… (288 bytes not shown)}})?"
            )
        );
        // A value that imitates the note stays within its quotes.
        let forged = prompt(json!({"a": "\"… (5 bytes not shown)"}));
        assert_eq!(forged, "Allow wipe({\"a\":\"\\\"… (5 bytes not shown)\"})?");
    }

    #[test]
    fn every_name_of_a_long_nested_value_is_shown() {
        let long = "x".repeat(10_000);
        let shown = prompt(json!({"a": {"b": long, "c": [{"d": long}, 2], "e": {"f": true}}, "force": true}));
        for name in ["\"a\":", "\"b\":", "\"c\":", "\"d\":", "\"e\":{\"f\":true}", "\"force\":true"] {
            assert!(shown.contains(name), "{name} in {shown}");
        }
        assert_eq!(shown.matches("bytes not shown)").count(), 2, "{shown}");
        let deep = (0..10).fold(json!(long), |deep, _| json!({"in": deep, "next": 1}));
        let shown = prompt(json!({"deep": deep, "force": true}));
        assert_eq!(shown.matches("\"in\":").count(), DEPTH - 1, "{shown}");
        assert!(shown.contains("{…} (101") && shown.ends_with("\"force\":true})?"), "{shown}");
    }

    #[test]
    fn no_argument_is_left_out_silently() {
        let many: Map<String, Value> =
            (0..10_000).map(|number| (format!("name{number:05}"), json!("v".repeat(100)))).collect();
        let shown = prompt(Value::Object(many));
        assert_eq!(shown.matches("\"name").count(), NAMES);
        let rest = 10_000 - NAMES;
        assert!(
            shown.ends_with(&format!(",… ({rest} names with {} bytes not shown)}})?", rest * 111)),
            "{shown}"
        );
        let name = "n".repeat(100);
        assert!(prompt(json!({ name: 1 })).contains("n\"… (36 bytes not shown):1"));
        let items = prompt(json!({"ids": (0..1000).collect::<Vec<u32>>()}));
        assert!(items.contains("63,… (936 items with 2772 bytes not shown)]"), "{items}");
    }

    #[test]
    fn the_length_of_a_question_is_bounded() {
        let long = "\u{202e}".repeat(1_000);
        let object = |count: usize, value: Value| -> Map<String, Value> {
            (0..count).map(|number| (format!("{number}{long}"), value.clone())).collect()
        };
        let (flat, few) = (object(300, json!(long)), object(8, json!(long)));
        for arguments in [flat, object(300, Value::Object(few))] {
            // A hidden character is three bytes long and takes eight to show.
            let length = approval_prompt("wipe", &arguments).len();
            assert!(length < 8 * ALL_BYTES, "{length}");
        }
    }

    #[test]
    fn hidden_characters_are_visible() {
        let shown = prompt(json!({"fi\u{200b}le": "gpj.\u{202e}exe", "tag": ["\u{e0041}"]}));
        assert_eq!(shown, r#"Allow wipe({"fi\u{200b}le":"gpj.\u{202e}exe","tag":["\u{e0041}"]})?"#);
    }
}
