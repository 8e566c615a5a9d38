//! Callback tokens: capabilities for one call each.
//!
//! A token names the thread, the thread's incarnation and the call, and is authenticated with the key that the server
//! used when the call was made. It depends only on the call, so that the callback URL is the same in all attempts. Its
//! bearer can send callbacks for that call and nothing else. A token must never be logged.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use rap_io::keyring::Keyring;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, Timestamp};

use crate::store::ThreadKey;

/// Length of the key id at the start of each token, which allows keys to be rotated while tokens are in use.
const KEY_ID_BYTES: usize = 4;
const MAC_BYTES: usize = 16;
const FIXED_BYTES: usize = KEY_ID_BYTES + 3 * 8;
const PURPOSE: &[u8] = b"callback";
/// Maximum length of a token, in characters.
const TOKEN_CHARS: usize = 600;

// Argued: TR-17 docs/run-an-agent.md says what a callback URL is for and how long it is valid
/// Creates and verifies tokens. The key of a call's time creates its token, and all keys verify tokens.
#[derive(Clone)]
pub(crate) struct Tokens {
    keys: Keyring,
    lifetime: Option<Duration>,
}

/// Content of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) thread: ThreadKey,
    pub(crate) incarnation: u64,
    pub(crate) since: Timestamp,
    pub(crate) call: CallId,
}

/// Returns a text that identifies a key without revealing it.
pub(crate) fn key_name(key: &Key) -> String {
    key_id(key).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Tokens {
    pub(crate) fn new(keys: Keyring, lifetime: Option<Duration>) -> Tokens {
        Tokens { keys, lifetime }
    }

    pub(crate) fn make(&self, grant: &Grant) -> String {
        let key = self.keys.at(grant.since);
        let mut bytes = Vec::with_capacity(FIXED_BYTES + grant.call.as_str().len() + MAC_BYTES);
        bytes.extend(key_id(key));
        bytes.extend(grant.thread.to_bytes());
        bytes.extend(grant.incarnation.to_be_bytes());
        bytes.extend(grant.since.0.to_be_bytes());
        bytes.extend(grant.call.as_str().as_bytes());
        let mac = key.mac(&[PURPOSE, &bytes]);
        bytes.extend(&mac[..MAC_BYTES]);
        BASE64_URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Returns the content of a token, or `None` if it is not authentic or has expired.
    pub(crate) fn read(&self, token: &str, now: Timestamp) -> Option<Grant> {
        if token.len() > TOKEN_CHARS {
            return None;
        }
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token).ok()?;
        let (body, mac) = bytes.split_at_checked(bytes.len().checked_sub(MAC_BYTES)?)?;
        let (name, rest) = body.split_first_chunk::<KEY_ID_BYTES>()?;
        let key = self.keys.all().find(|key| key_id(key) == *name)?;
        let expected = key.mac(&[PURPOSE, body]);
        if !bool::from(subtle::ConstantTimeEq::ct_eq(&expected[..MAC_BYTES], mac)) {
            return None;
        }
        let (thread, rest) = rest.split_first_chunk::<8>()?;
        let (incarnation, rest) = rest.split_first_chunk::<8>()?;
        let (since, call) = rest.split_first_chunk::<8>()?;
        let grant = Grant {
            thread: ThreadKey::from_bytes(*thread),
            incarnation: u64::from_be_bytes(*incarnation),
            since: Timestamp(i64::from_be_bytes(*since)),
            call: CallId::new(std::str::from_utf8(call).ok()?).ok()?,
        };
        let expired = self.lifetime.is_some_and(|lifetime| grant.since.plus(lifetime) < now);
        (!expired).then_some(grant)
    }
}

fn key_id(key: &Key) -> [u8; KEY_ID_BYTES] {
    *key.mac(&[b"key id"]).first_chunk().expect("bug: a MAC has 32 bytes")
}

#[cfg(test)]
mod tests {
    use rap_protocol::limits;
    use rap_testkit::fuzz::Fuzz;

    use super::*;

    fn key(digit: &str) -> Keyring {
        Keyring::parse(&digit.repeat(64)).unwrap()
    }

    /// The first key, and from second 2 on the second one.
    fn rotated(first: &str, second: &str) -> Keyring {
        let text = format!("{},{}@1970-01-01T00:00:02Z", first.repeat(64), second.repeat(64));
        Keyring::parse(&text).unwrap()
    }

    fn grant() -> Grant {
        Grant {
            thread: ThreadKey::from_bytes(7i64.to_be_bytes()),
            incarnation: u64::MAX,
            since: Timestamp(1000),
            call: CallId::new("call_1").unwrap(),
        }
    }

    /// Proves: TR-20
    #[test]
    fn only_the_unchanged_token_is_accepted_and_only_with_its_key() {
        let tokens = Tokens::new(key("a"), None);
        let token = tokens.make(&grant());
        assert_eq!(tokens.read(&token, Timestamp(0)), Some(grant()));
        assert_eq!(Tokens::new(key("b"), None).read(&token, Timestamp(0)), None);
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(&token).unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut forged = bytes.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(tokens.read(&BASE64_URL_SAFE_NO_PAD.encode(forged), Timestamp(0)), None, "bit {bit}");
        }
        for length in 0..bytes.len() {
            assert_eq!(tokens.read(&BASE64_URL_SAFE_NO_PAD.encode(&bytes[..length]), Timestamp(0)), None);
        }
    }

    /// Fuzz target: a token that this server did not make is never accepted. The last byte selects the form of the
    /// input: a token, or the bytes of one.
    #[test]
    fn fuzz() {
        let (tokens, other) = (Tokens::new(rotated("a", "b"), None), Tokens::new(key("c"), None));
        let calls = ["call_1", "c", "rap_0123456789abcdef_17", &"x".repeat(limits::ID_BYTES)];
        let made = calls.map(|call| tokens.make(&Grant { call: CallId::new(call).unwrap(), ..grant() }));
        let foreign = other.make(&grant());
        let seeds = made.iter().chain([&foreign]).flat_map(|token| {
            let bytes = BASE64_URL_SAFE_NO_PAD.decode(token).unwrap();
            [[token.as_bytes(), b"t"].concat(), [bytes.as_slice(), b"b"].concat()]
        });
        let words = &["=", "==", "-", "_", "+", "/", "A", "%3D", "call_1", "AAAA"];
        Fuzz { name: "tokens", seeds: seeds.collect(), words }.run(|input| {
            let token = match input.split_last() {
                Some((b'b', bytes)) => BASE64_URL_SAFE_NO_PAD.encode(bytes),
                Some((_, text)) => String::from_utf8_lossy(text).into_owned(),
                None => String::new(),
            };
            let read = tokens.read(&token, Timestamp(0));
            assert_eq!(read.is_some(), made.contains(&token), "{token}");
            assert!(read.as_ref().is_none_or(|grant| tokens.make(grant) == token), "{token}");
            assert_eq!(other.read(&token, Timestamp(0)).is_some(), token == foreign, "{token}");
            format!("{} {}", read.is_some(), "x".repeat(token.len() / 16))
        });
    }

    #[test]
    fn a_call_always_has_the_same_token() {
        let tokens = Tokens::new(key("a"), None);
        assert_eq!(tokens.make(&grant()), tokens.make(&grant()));
    }

    #[test]
    fn a_call_keeps_its_token_when_the_key_is_replaced() {
        let (before, after) = (grant(), Grant { since: Timestamp(2000), ..grant() });
        let [first, second] = ["a", "b"].map(|digit| Tokens::new(key(digit), None));
        let tokens = Tokens::new(rotated("a", "b"), None);
        assert_eq!(tokens.make(&before), first.make(&before));
        assert_eq!(tokens.make(&after), second.make(&after));
        for grant in [before, after] {
            assert_eq!(tokens.read(&tokens.make(&grant), Timestamp(0)), Some(grant));
        }
        // A token that was made with the old key after its time is still accepted.
        let late = Grant { since: Timestamp(9000), ..grant() };
        assert_eq!(tokens.read(&first.make(&late), Timestamp(0)), Some(late));
        // Without the old key, its tokens are worthless.
        assert_eq!(second.read(&first.make(&grant()), Timestamp(0)), None);
    }

    #[test]
    fn a_token_expires_after_the_configured_lifetime() {
        let tokens = Tokens::new(key("a"), Some(Duration::from_secs(1)));
        let token = tokens.make(&grant());
        assert!(tokens.read(&token, Timestamp(2000)).is_some());
        assert!(tokens.read(&token, Timestamp(2001)).is_none());
    }
}
