//! Short names for ids that the runtime makes.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::Item;
use rap_protocol::{CallId, ThreadId};

use super::{id, thread_id};

/// Names of calls, threads and questions. Calls of the model are registered with the model's ids; all other names are
/// assigned in order of appearance.
#[derive(Clone, Default)]
pub struct Names {
    calls: BTreeMap<String, String>,
    /// Id of the last call of each name.
    ids: BTreeMap<String, String>,
    made: usize,
    threads: Vec<String>,
    questions: Vec<u64>,
}

impl Names {
    /// Returns names with the same calls for another thread, which has other children.
    pub fn without_threads(&self) -> Names {
        Names { threads: Vec::new(), ..self.clone() }
    }

    /// Registers the calls of an answer by the ids that the model gave. If an answer repeats an id, `'` is appended.
    pub fn register(&mut self, item: &Item) {
        let Item::Assistant { calls, .. } = item else { return };
        let mut taken = BTreeSet::new();
        for call in calls {
            let Some(own) = &call.model_id else { continue };
            let mut name = own.to_string();
            while !taken.insert(name.clone()) {
                name.push('\'');
            }
            self.name(call.id.as_str(), name);
        }
    }

    fn name(&mut self, id: &str, name: String) {
        self.ids.insert(name.clone(), id.to_owned());
        self.calls.insert(id.to_owned(), name);
    }

    /// Returns the call with this name; if there is none, the name itself as an id.
    pub fn call(&self, name: &str) -> CallId {
        id(self.ids.get(name).map_or(name, String::as_str))
    }

    /// Returns the thread with this name; if there is none, the name itself as an id.
    pub fn thread(&self, name: &str) -> ThreadId {
        let number = name.strip_prefix('t').and_then(|number| number.parse::<usize>().ok());
        let known = number.and_then(|number| self.threads.get(number.checked_sub(1)?));
        thread_id(known.map_or(name, String::as_str))
    }

    /// Returns the number of a question in order of appearance.
    pub fn question(&mut self, number: u64) -> usize {
        let at = self.questions.iter().position(|known| *known == number).unwrap_or_else(|| {
            self.questions.push(number);
            self.questions.len() - 1
        });
        at + 1
    }

    /// Replaces all ids in a text by names.
    pub fn show(&mut self, text: &str) -> String {
        let mut shown = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let length = call_length(rest).or_else(|| thread_length(rest).filter(|_| ends_word(&shown)));
            let Some(length) = length else {
                shown.push(first);
                rest = &rest[first.len_utf8()..];
                continue;
            };
            let (id, behind) = rest.split_at(length);
            shown.push_str(&if first == 't' { self.show_thread(id) } else { self.show_call(id) });
            rest = behind;
        }
        shown
    }

    fn show_call(&mut self, id: &str) -> String {
        if let Some(name) = self.calls.get(id) {
            return name.clone();
        }
        self.made += 1;
        let name = format!("rap_{}", self.made);
        self.name(id, name.clone());
        name
    }

    fn show_thread(&mut self, id: &str) -> String {
        let at = self.threads.iter().position(|known| known == id).unwrap_or_else(|| {
            self.threads.push(id.to_owned());
            self.threads.len() - 1
        });
        format!("t{}", at + 1)
    }
}

fn ends_word(text: &str) -> bool {
    !text.ends_with(|char: char| char.is_ascii_alphanumeric())
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the length of the call id at the start of a text: `rap_`, 16 hexadecimal digits, `_` and a number.
fn call_length(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("rap_")?;
    let (incarnation, rest) = (rest.get(..16)?, rest.get(16..)?.strip_prefix('_')?);
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    (is_hex(incarnation) && digits > 0).then_some(4 + 16 + 1 + digits)
}

/// Returns the length of the thread id at the start of a text: `t` and 27 hexadecimal digits.
fn thread_length(text: &str) -> Option<usize> {
    let digits = text.strip_prefix('t')?.get(..27)?;
    is_hex(digits).then_some(28)
}
