//! Who is calling. The token is compared in constant time and never kept beside what it authenticated: a
//! caller is known by a keyed hash of its token.

use std::fmt;

use axum::http::{HeaderMap, header};
use rap_io::secret_box::Key;
use rap_protocol::Secret;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// How a server knows its callers.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Auth {
    /// Callers show this token in an `Authorization: Bearer` header. Several tokens can be given; each is a
    /// caller of its own, whose calls and threads the others can not touch.
    Bearer(String),
    /// Anyone who can reach the server may call its tools. Without this, a server that knows no token binds to
    /// loopback only.
    OpenToAnyone,
}

/// An authenticated caller. All that is anonymous is one caller.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Caller([u8; 16]);

impl Caller {
    const ANONYMOUS: Caller = Caller([0; 16]);

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Caller(bytes)
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", u32::from_be_bytes(*self.0.first_chunk().expect("bug: 16 bytes")))
    }
}

/// The callers that a server knows.
pub(crate) struct Callers {
    /// The hash of each token, and who shows it.
    known: Vec<([u8; 32], Caller)>,
}

impl Callers {
    pub(crate) fn new(tokens: &[Secret], key: &Key) -> Self {
        let caller = |token: &Secret| {
            let mac = key.mac(&[b"caller", token.expose().as_bytes()]);
            (digest(token.expose()), Caller(*mac.first_chunk().expect("bug: a MAC has 32 bytes")))
        };
        Callers { known: tokens.iter().map(caller).collect() }
    }

    /// Whether anyone may call.
    pub(crate) fn is_open(&self) -> bool {
        self.known.is_empty()
    }

    /// Who sends these headers; `None` for nobody we know.
    pub(crate) fn recognise(&self, headers: &HeaderMap) -> Option<Caller> {
        if self.is_open() {
            return Some(Caller::ANONYMOUS);
        }
        let shown = digest(bearer(headers)?);
        // All are compared, so that the time tells nothing about which one it is.
        let mut found = None;
        for (token, caller) in &self.known {
            if bool::from(token.ct_eq(&shown)) {
                found = Some(caller.clone());
            }
        }
        found
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key::parse(&"ab".repeat(32)).unwrap()
    }

    fn shown(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    /// Proves: TR-19, TC-18, CN-20
    #[test]
    fn each_token_is_a_caller_of_its_own() {
        let callers = Callers::new(&[Secret::new("one"), Secret::new("two")], &key());
        let one = callers.recognise(&shown("Bearer one")).unwrap();
        let two = callers.recognise(&shown("bearer two")).unwrap();
        assert!(one != two);
        for wrong in ["Bearer three", "Bearer ", "Bearer", "Basic one", "one", "Bearer one two"] {
            assert!(callers.recognise(&shown(wrong)).is_none(), "{wrong}");
        }
        assert!(callers.recognise(&HeaderMap::new()).is_none());
    }

    #[test]
    fn without_tokens_everyone_is_the_same_caller() {
        let callers = Callers::new(&[], &key());
        assert!(callers.is_open());
        assert!(callers.recognise(&HeaderMap::new()) == Some(Caller::ANONYMOUS));
    }
}
