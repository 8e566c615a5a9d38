//! Adapts names and ids to a provider's rules: letters, digits, `_` and `-`, up to a maximum length.
//!
//! A name that follows the rules is not changed. Any other name becomes its allowed part and a hash of the whole name. If
//! the result is already in use, another hash is tried.

use std::collections::{HashMap, HashSet};

use super::CallIds;

/// Characters of a short id, and their number.
const SHORT_ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const SHORT_CHARS: u32 = 9;
/// `_` and 16 hexadecimal digits.
const TAIL_CHARS: usize = 17;

/// Mapping between real tool names and the names in a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    longest: usize,
    fitted: HashMap<String, String>,
    real: HashMap<String, String>,
}

impl Names {
    pub(super) fn new(longest: usize) -> Self {
        Names { longest, fitted: HashMap::new(), real: HashMap::new() }
    }

    /// Returns the name in the request. The same real name always gives the same result.
    pub(super) fn fit(&mut self, real: &str) -> String {
        if let Some(fitted) = self.fitted.get(real) {
            return fitted.clone();
        }
        let fitted = unique(real, self.longest, |name| self.real.contains_key(name));
        self.fitted.insert(real.into(), fitted.clone());
        self.real.insert(fitted.clone(), real.into());
        fitted
    }

    pub(super) fn has(&self, real: &str) -> bool {
        self.fitted.contains_key(real)
    }

    /// Returns the real name for a name from the request. A name that is not in the request was invented by the model and
    /// is returned unchanged.
    pub fn real<'a>(&'a self, fitted: &'a str) -> &'a str {
        self.real.get(fitted).map_or(fitted, String::as_str)
    }
}

/// Call ids of a request. Every id is unique, even if a history repeats one.
pub(super) struct Ids {
    form: CallIds,
    longest: usize,
    taken: HashSet<String>,
}

impl Ids {
    /// Creates a set of ids of at most `longest` characters.
    pub(super) fn new(form: CallIds, longest: usize) -> Self {
        Ids { form, longest, taken: HashSet::new() }
    }

    pub(super) fn fit(&mut self, id: &str) -> String {
        let is_taken = |id: &str| self.taken.contains(id);
        let fitted = match self.form {
            CallIds::Wire => unique(id, self.longest, is_taken),
            CallIds::Short => first_free(|attempt| short(id, attempt), is_taken),
        };
        self.taken.insert(fitted.clone());
        fitted
    }
}

/// Returns the short form of a call id: exactly nine letters and digits, as Mistral's server requires. It depends on the
/// id alone, so it is the same in every prompt.
pub fn short_call_id(id: &str) -> String {
    short(id, 0)
}

fn short(id: &str, attempt: u64) -> String {
    let base = SHORT_ALPHABET.len() as u64;
    let hash = fnv(id.as_bytes(), attempt);
    (0..SHORT_CHARS)
        .map(|place| char::from(SHORT_ALPHABET[(hash / base.pow(place) % base) as usize]))
        .collect()
}

fn unique(text: &str, longest: usize, taken: impl Fn(&str) -> bool) -> String {
    if fits(text, longest) && !taken(text) {
        return text.into();
    }
    first_free(|attempt| hashed(text, attempt, longest), taken)
}

fn first_free(candidate: impl Fn(u64) -> String, taken: impl Fn(&str) -> bool) -> String {
    (0..).map(candidate).find(|name| !taken(name)).expect("bug: there are more hashes than names")
}

fn fits(text: &str, longest: usize) -> bool {
    (1..=longest).contains(&text.len()) && text.chars().all(is_plain)
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

fn hashed(text: &str, attempt: u64, longest: usize) -> String {
    let plain = text.chars().map(|c| if is_plain(c) { c } else { '_' });
    let head: String = plain.take(longest - TAIL_CHARS).collect();
    format!("{head}_{:016x}", fnv(text.as_bytes(), attempt))
}

/// FNV-1a. The standard library's hash may change between versions, which would invalidate every cached prompt.
fn fnv(bytes: &[u8], seed: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_name_is_not_changed_and_other_names_become_unique() {
        let mut names = Names::new(20);
        assert_eq!(names.fit("read-file_2"), "read-file_2");
        let (dot, slash) = (names.fit("a.b"), names.fit("a/b"));
        assert!(dot.starts_with("a_b_") && slash.starts_with("a_b_") && dot != slash, "{dot} {slash}");
        for odd in ["", "ä", &"x".repeat(21), "☃☃☃☃☃☃☃☃☃☃☃☃☃"] {
            let fitted = names.fit(odd);
            assert!(fits(&fitted, 20), "{fitted}");
            assert_eq!(names.fit(odd), fitted);
            assert_eq!(names.real(&fitted), odd);
        }
        assert_eq!(names.real("never seen"), "never seen");
    }

    #[test]
    fn a_name_that_equals_an_adapted_one_becomes_unique() {
        let mut names = Names::new(64);
        let first = names.fit("a.b");
        let second = names.fit(&first);
        assert_ne!(first, second);
        assert_eq!((names.real(&first), names.real(&second)), ("a.b", first.as_str()));
    }

    #[test]
    fn every_id_is_unique() {
        let mut ids = Ids::new(CallIds::Wire, 40);
        let all: HashSet<_> = (0..50).map(|_| ids.fit("call_1")).collect();
        assert_eq!(all.len(), 50);
        assert!(all.contains("call_1") && all.iter().all(|id| fits(id, 40)));
    }

    #[test]
    fn short_ids_have_nine_letters_and_digits_and_depend_on_the_id_alone() {
        let mut ids = Ids::new(CallIds::Short, 40);
        let all: Vec<_> = (0..2_000).map(|number| ids.fit(&format!("thread-1_{number}"))).collect();
        for (number, id) in all.iter().enumerate() {
            assert_eq!(*id, short_call_id(&format!("thread-1_{number}")));
            assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
        }
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        // An id that a history repeats is still unique in a request.
        assert_ne!(ids.fit("thread-1_0"), all[0]);
    }
}
