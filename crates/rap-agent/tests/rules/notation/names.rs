//! Short names for the ids that the runtime makes.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::Item;
use rap_protocol::{CallId, ThreadId};

use super::{id, thread_id};

/// Names of calls, threads and questions. Those of calls that the model made are registered; all others are given in
/// order of appearance.
#[derive(Clone, Default)]
pub struct Names {
    calls: BTreeMap<String, String>,
    /// The last call of each name.
    ids: BTreeMap<String, String>,
    made: usize,
    threads: Vec<String>,
    questions: Vec<u64>,
}

impl Names {
    /// The same calls in another thread, which has children of its own.
    pub fn without_threads(&self) -> Names {
        Names { threads: Vec::new(), ..self.clone() }
    }

    /// Registers the calls that the model makes by their own ids. A second one of the same id has a mark behind it.
    pub fn register(&mut self, item: &Item) {
        let Item::Assistant { calls, .. } = item else { return };
        let mut taken = BTreeSet::new();
        for call in calls {
            let Some(own) = &call.call_id else { continue };
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

    /// The call of a name; the name itself if there is none.
    pub fn call(&self, name: &str) -> CallId {
        id(self.ids.get(name).map_or(name, String::as_str))
    }

    /// The thread of a name; the name itself if there is none.
    pub fn thread(&self, name: &str) -> ThreadId {
        let number = name.strip_prefix('t').and_then(|number| number.parse::<usize>().ok());
        let known = number.and_then(|number| self.threads.get(number.checked_sub(1)?));
        thread_id(known.map_or(name, String::as_str))
    }

    /// The number of a question in order of appearance.
    pub fn question(&mut self, no: u64) -> usize {
        let at = self.questions.iter().position(|known| *known == no).unwrap_or_else(|| {
            self.questions.push(no);
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

/// Length of the call id that a text begins with: `rap_`, 16 hexadecimal digits, `_` and a number.
fn call_length(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("rap_")?;
    let (incarnation, rest) = (rest.get(..16)?, rest.get(16..)?.strip_prefix('_')?);
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    (is_hex(incarnation) && digits > 0).then_some(4 + 16 + 1 + digits)
}

/// Length of the thread id that a text begins with: `t` and 27 hexadecimal digits.
fn thread_length(text: &str) -> Option<usize> {
    let digits = text.strip_prefix('t')?.get(..27)?;
    is_hex(digits).then_some(28)
}
