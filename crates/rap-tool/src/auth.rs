//! Authentication of callers.
//!
//! Tokens are compared in constant time. Stored data never contains a token: a caller is identified by a keyed hash
//! of its token.

use std::collections::HashSet;
use std::fmt;

use axum::http::{HeaderMap, header};
use rap_io::secret_box::Key;
use rap_protocol::Secret;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Authentication of the callers of a server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Auth {
    /// Callers send this token in an `Authorization: Bearer` header. A server can have several tokens. Each token is
    /// a separate caller, and callers have no access to each other's calls and threads.
    Bearer(String),
    /// Everyone who can reach the server may call its tools. Without this, a server that has no token binds only to
    /// loopback addresses.
    OpenToAnyone,
}

/// An authenticated caller. All anonymous requests belong to one caller.
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

pub(crate) struct Callers {
    /// SHA-256 of each token, and its caller.
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

    /// Returns all callers that the server knows.
    pub(crate) fn all(&self) -> HashSet<Caller> {
        if self.is_open() {
            return HashSet::from([Caller::ANONYMOUS]);
        }
        self.known.iter().map(|(_, caller)| caller.clone()).collect()
    }

    /// Returns true if no token is required.
    pub(crate) fn is_open(&self) -> bool {
        self.known.is_empty()
    }

    /// Returns the caller that sent these headers. `None` if the token is missing or unknown.
    pub(crate) fn authenticate(&self, headers: &HeaderMap) -> Option<Caller> {
        if self.is_open() {
            return Some(Caller::ANONYMOUS);
        }
        let shown = digest(bearer(headers)?);
        // Compares all tokens, so that the time does not reveal which one matched.
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
    fn each_token_is_a_separate_caller() {
        let callers = Callers::new(&[Secret::new("one"), Secret::new("two")], &key());
        let one = callers.authenticate(&shown("Bearer one")).unwrap();
        let two = callers.authenticate(&shown("bearer two")).unwrap();
        assert!(one != two);
        for wrong in ["Bearer three", "Bearer ", "Bearer", "Basic one", "one", "Bearer one two"] {
            assert!(callers.authenticate(&shown(wrong)).is_none(), "{wrong}");
        }
        assert!(callers.authenticate(&HeaderMap::new()).is_none());
    }

    #[test]
    fn without_tokens_everyone_is_the_same_caller() {
        let callers = Callers::new(&[], &key());
        assert!(callers.is_open());
        assert!(callers.authenticate(&HeaderMap::new()) == Some(Caller::ANONYMOUS));
    }
}
