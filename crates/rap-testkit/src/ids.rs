//! Readable names for the call ids of the runtime. A call of the model has the model's own id as its name (`call_1_1`), a
//! synthetic one its number among the synthetic calls (`rap_1`). Ids of the first release are short and kept.

use serde_json::Value;

/// Ids of calls and their names.
#[derive(Debug, Clone, Default)]
pub struct Ids(Vec<(String, String)>);

impl Ids {
    /// Collects the calls of a history.
    pub fn of(history: &[Value]) -> Ids {
        let mut ids = Ids::default();
        ids.add(history);
        ids
    }

    /// Adds the calls of another history.
    pub fn add(&mut self, history: &[Value]) {
        let mut made = 0;
        for call in history.iter().filter_map(|entry| entry["calls"].as_array()).flatten() {
            let id = call["id"].as_str().unwrap().to_owned();
            let name = match call["model_id"].as_str() {
                Some(name) => name.to_owned(),
                None if !is_runtime_id(&id) => id.clone(),
                None => {
                    made += 1;
                    format!("rap_{made}")
                }
            };
            if !self.0.iter().any(|(known, _)| *known == id) {
                self.0.push((id, name));
            }
        }
        // An id may be a prefix of another.
        self.0.sort_by_key(|(id, _)| std::cmp::Reverse(id.len()));
    }

    /// Replaces ids by names in a text.
    pub fn named(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (id, name)| text.replace(id, name))
    }

    /// Replaces ids by names in every string of a document.
    pub fn named_in(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.named(text)),
            Value::Array(items) => items.iter().map(|item| self.named_in(item)).collect(),
            Value::Object(fields) => {
                fields.iter().map(|(key, value)| (key.clone(), self.named_in(value))).collect()
            }
            other => other.clone(),
        }
    }

    /// Returns the id of a name; the name itself if it is unknown.
    pub fn id<'a>(&'a self, name: &'a str) -> &'a str {
        self.0.iter().find(|(_, known)| known == name).map_or(name, |(id, _)| id)
    }
}

/// Shortens the ids in a text: `rap_7` is the seventh id of its thread.
pub fn short(text: &str) -> String {
    const RANDOM: usize = 16;
    let mut parts = text.split("rap_");
    let mut shortened = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        shortened.push_str("rap_");
        let random = part.get(..RANDOM).filter(|random| random.chars().all(|c| c.is_ascii_hexdigit()));
        let rest = random.and_then(|_| part.get(RANDOM..)?.strip_prefix('_'));
        shortened.push_str(rest.unwrap_or(part));
    }
    shortened
}

/// Returns true for an id of the runtime, `rap_<16 hex digits>_<number>`.
fn is_runtime_id(id: &str) -> bool {
    let parts: Vec<&str> = id.split('_').collect();
    matches!(parts.as_slice(), ["rap", thread, _] if thread.len() == 16)
}
