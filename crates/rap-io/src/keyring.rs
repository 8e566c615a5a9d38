//! The keys of a server over time. A key can be replaced while tokens and secrets that were made with older keys are
//! still in use.
//!
//! The text form has one key after the other, separated by line breaks or commas, the oldest first. Each but the first has
//! the time from which it is used: `KEY@2026-12-01T00:00:00Z`. So the key of anything that has a date is a function of that
//! date, on every node and after every restart.

use rap_protocol::Timestamp;

use crate::secret_box::Key;

/// Maximum number of keys.
const KEYS: usize = 8;

/// One to eight keys.
#[derive(Debug, Clone)]
pub struct Keyring(Vec<(Timestamp, Key)>);

/// The text is not a list of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a key of 64 hexadecimal digits or the base64 of 32 bytes, or up to eight of them, the oldest first, \
     separated by commas or line breaks; each but the first has the time from which it is used: KEY@2026-12-01T00:00:00Z"
)]
pub struct BadKeyring;

impl From<Key> for Keyring {
    fn from(key: Key) -> Self {
        Keyring(vec![(Timestamp(i64::MIN), key)])
    }
}

impl Keyring {
    /// Parses the text form.
    pub fn parse(text: &str) -> Result<Keyring, BadKeyring> {
        let mut keys: Vec<(Timestamp, Key)> = Vec::new();
        for item in text.split([',', '\n']).map(str::trim).filter(|item| !item.is_empty()) {
            let (key, from) = match item.split_once('@') {
                None => (item, Timestamp(i64::MIN)),
                Some((key, from)) => {
                    let from: jiff::Timestamp = from.parse().map_err(|_| BadKeyring)?;
                    (key, Timestamp(from.as_millisecond()))
                }
            };
            if keys.len() == KEYS || keys.last().is_some_and(|(before, _)| *before >= from) {
                return Err(BadKeyring);
            }
            keys.push((from, Key::parse(key).map_err(|_| BadKeyring)?));
        }
        if keys.is_empty() { Err(BadKeyring) } else { Ok(Keyring(keys)) }
    }

    /// Returns the key of this time: the newest one whose time of use has begun by then, or else the first one.
    pub fn at(&self, time: Timestamp) -> &Key {
        let found = self.0.iter().rev().find(|(from, _)| *from <= time);
        let (_, key) = found.or(self.0.first()).expect("bug: a keyring has a key");
        key
    }

    /// Returns all keys, the oldest first.
    pub fn all(&self) -> impl Iterator<Item = &Key> {
        self.0.iter().map(|(_, key)| key)
    }

    /// Returns a key that encrypts with the key of this time and decrypts with any.
    pub fn for_storage(&self, now: Timestamp) -> Key {
        self.at(now).with_others(self.all())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const NEW: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
    /// 2026-12-01T00:00:00Z
    const FROM: Timestamp = Timestamp(1_796_083_200_000);

    fn is(key: &Key, text: &str) -> bool {
        key.mac(&[b"x"]) == Key::parse(text).unwrap().mac(&[b"x"])
    }

    #[test]
    fn the_key_of_a_time_is_the_newest_that_is_used_then() {
        for text in
            [format!("{OLD},{NEW}@2026-12-01T00:00:00Z"), format!("{OLD}\n{NEW}@2026-12-01T01:00:00+01:00\n")]
        {
            let keys = Keyring::parse(&text).unwrap();
            assert!(is(keys.at(Timestamp(0)), OLD));
            assert!(is(keys.at(Timestamp(FROM.0 - 1)), OLD));
            assert!(is(keys.at(FROM), NEW));
            assert_eq!(keys.all().count(), 2);
        }
        // The oldest key was removed. Secrets that were encrypted with it are lost; all others can still be decrypted.
        let rest = Keyring::parse(&format!("{NEW}@2026-12-01T00:00:00Z")).unwrap();
        assert!(is(rest.at(Timestamp(0)), NEW) && is(rest.at(FROM), NEW));
        assert!(is(Keyring::parse(OLD).unwrap().at(FROM), OLD));
    }

    #[test]
    fn lists_without_order_or_times_are_refused() {
        let many =
            (1..=KEYS + 1).map(|day| format!("{OLD}@2026-12-0{day}T00:00:00Z")).collect::<Vec<_>>().join(",");
        for bad in [
            String::new(),
            "\n,\n".into(),
            "hunter2".into(),
            format!("{OLD},{NEW}"),
            format!("{OLD}@2026-12-01T00:00:00Z,{NEW}"),
            format!("{OLD}@2026-12-02T00:00:00Z,{NEW}@2026-12-01T00:00:00Z"),
            format!("{OLD}@tomorrow"),
            format!("{OLD}@2026-12-01"),
            many,
        ] {
            let error = Keyring::parse(&bad).unwrap_err().to_string();
            assert!(!error.contains("hunter2") && !error.contains("aaaa"), "{error}");
        }
    }

    #[test]
    fn stored_secrets_stay_readable_and_new_ones_use_the_key_of_the_time() {
        let keys = Keyring::parse(&format!("{OLD},{NEW}@2026-12-01T00:00:00Z")).unwrap();
        let [old, new] = [OLD, NEW].map(|text| Key::parse(text).unwrap());
        for (now, own, other) in [(Timestamp(0), &old, &new), (FROM, &new, &old)] {
            let storage = keys.for_storage(now);
            assert_eq!(storage.open(&other.seal(b"url", b"row"), b"row").unwrap(), b"url");
            assert!(storage.verify_mac(&[b"x"], &other.mac(&[b"x"])));
            let sealed = storage.seal(b"url", b"row");
            assert!(own.open(&sealed, b"row").is_ok() && other.open(&sealed, b"row").is_err());
        }
    }
}
