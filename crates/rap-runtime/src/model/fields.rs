//! Fields of a message or call that are not part of the documented format. Servers require some of them back, such as
//! `reasoning_content`, the signature in `extra_content`, and `phase`.

use rap_agent::Thoughts;
use rap_agent::prompt::ServedModel;
use serde_json::{Map, Value};

/// Texts in an item of a list, which come in pieces.
const TEXTS: &[&str] = &["text", "summary", "data"];
/// Maximum total size of the fields of an answer as JSON, in bytes. Larger ones are not kept.
const MAX_BYTES: usize = 1024 * 1024;

/// Returns the fields of an item of an answer that are not known, with the item's type, which tells to which API they
/// belong. Empty if there are none.
pub(super) fn of_item(item: &Value, known: &[&str]) -> Map<String, Value> {
    let mut fields = Map::new();
    add(&mut fields, item, known);
    if let (false, Some(kind)) = (fields.is_empty(), item.get("type")) {
        fields.insert("type".into(), kind.clone());
    }
    fields
}

/// Adds the fields of a message and its calls, with the server to which they go back. Fields that are too large are not
/// kept.
pub(super) fn keep(
    thoughts: Thoughts,
    origin: ServedModel<'_>,
    fields: Map<String, Value>,
    call_fields: Vec<Map<String, Value>>,
) -> Thoughts {
    let call_fields = if call_fields.iter().all(Map::is_empty) { Vec::new() } else { call_fields };
    if fields.is_empty() && call_fields.is_empty() {
        return thoughts;
    }
    let bytes = serde_json::to_vec(&(&fields, &call_fields)).map_or(usize::MAX, |json| json.len());
    if bytes > MAX_BYTES {
        tracing::warn!(bytes, "the additional fields of an answer are too large and are not kept");
        return thoughts;
    }
    Thoughts { server: Some(origin.server.to_owned()), fields, call_fields, ..thoughts }
}

/// Returns the memory of parsed fields, in bytes. A map needs that of at least a few fields.
pub(super) fn memory(fields: &Map<String, Value>) -> usize {
    const MAP_BYTES: usize = 640;
    let field = |(name, value): (&String, &Value)| name.len() + memory_of(value);
    if fields.is_empty() { 0 } else { MAP_BYTES + fields.iter().map(field).sum::<usize>() }
}

/// Returns the memory of a parsed value, in bytes.
pub(super) fn memory_of(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(memory_of).sum(),
            Value::Object(fields) => memory(fields),
        }
}

/// Adds the fields of a piece. Texts and lists continue the earlier ones, and anything else replaces them. Returns the
/// memory of what it adds, in bytes.
pub(super) fn add(fields: &mut Map<String, Value>, piece: &Value, known: &[&str]) -> usize {
    let mut added = 0;
    for (name, value) in piece.as_object().into_iter().flatten() {
        if known.contains(&name.as_str()) || value.is_null() || name.contains('\0') {
            continue;
        }
        added += name.len() + memory_of(value);
        match (fields.get_mut(name), value) {
            (Some(Value::String(text)), Value::String(more)) => text.push_str(more),
            (Some(Value::Array(items)), Value::Array(more)) => {
                more.iter().for_each(|item| add_item(items, item))
            }
            (Some(Value::Object(members)), Value::Object(_)) => _ = add(members, value, &[]),
            (Some(old), value) => *old = value.clone(),
            (None, value) => {
                fields.insert(name.clone(), value.clone());
            }
        }
    }
    added
}

/// Adds an item to a list. An item with the index of an earlier one continues it.
fn add_item(items: &mut Vec<Value>, item: &Value) {
    let index = item.get("index").filter(|index| !index.is_null());
    let earlier = items.iter_mut().find(|earlier| index.is_some() && earlier.get("index") == index);
    let (Some(Value::Object(earlier)), Value::Object(item)) = (earlier, item) else {
        items.push(item.clone());
        return;
    };
    for (name, value) in item {
        match (earlier.get_mut(name), value) {
            (Some(Value::String(text)), Value::String(more)) if TEXTS.contains(&name.as_str()) => {
                text.push_str(more);
            }
            (Some(_), Value::Null) => {}
            _ => {
                earlier.insert(name.clone(), value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pieces_of_a_field_are_joined() {
        let pieces = [
            json!({"content": "x", "reasoning_content": "a", "reasoning_details": [{"index": 0, "type": "t", "text": "1"}]}),
            json!({"reasoning_content": null, "extra_content": {"google": {"a": 1}}}),
            json!({"reasoning_content": "b", "reasoning_details": [{"index": 0, "type": "t", "text": "2"}]}),
            json!({"extra_content": {"google": {"b": 2}}, "reasoning_details": [{"index": 1}, {"signature": "s"}]}),
        ];
        let mut fields = Map::new();
        let added: usize = pieces.iter().map(|piece| add(&mut fields, piece, &["content"])).sum();
        let expected = json!({
            "reasoning_content": "ab",
            "reasoning_details": [{"index": 0, "type": "t", "text": "12"}, {"index": 1}, {"signature": "s"}],
            "extra_content": {"google": {"a": 1, "b": 2}},
        });
        assert!(added >= memory(&fields), "{added}");
        assert_eq!(Value::Object(fields), expected);
    }
}
