//! Tokens that clients authenticate with, and what they may see.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use rap_api::TokenScope;
use rap_protocol::{Secret, Timestamp, UserId};
use sha2::{Digest, Sha256};

/// Maximum number of tokens.
pub(crate) const TOKENS: usize = 10_000;
/// Begins every created token, so that people and scanners recognise it.
const PREFIX: &str = "rap_";
/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;
/// Length of a created token, in characters.
const TOKEN_CHARS: usize = PREFIX.len() + (TOKEN_BYTES * 8).div_ceil(6);

/// Makes a token from four random numbers.
pub(crate) fn new_token(random: [u64; TOKEN_BYTES / 8]) -> Secret {
    let bytes: Vec<u8> = random.into_iter().flat_map(u64::to_be_bytes).collect();
    Secret::new(format!("{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes)))
}

/// Returns true if a token may have been made by [`new_token`].
pub(crate) fn may_be_created(token: &str) -> bool {
    token.len() == TOKEN_CHARS && token.starts_with(PREFIX)
}

/// The SHA-256 of a token. A token is random, so that its digest needs no salt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenDigest(pub(super) [u8; 32]);

impl TokenDigest {
    pub(crate) fn of(token: &str) -> TokenDigest {
        TokenDigest(Sha256::digest(token).into())
    }

    pub(crate) fn from_bytes(bytes: [u8; 32]) -> TokenDigest {
        TokenDigest(bytes)
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenDigest(…)")
    }
}

/// Identifies a token. The id of a revoked token is not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TokenId(pub(super) i64);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for TokenId {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<TokenId, ParseIntError> {
        text.parse().map(TokenId)
    }
}

/// A token to be stored.
#[derive(Debug, Clone)]
pub(crate) struct NewClientToken {
    pub(crate) digest: TokenDigest,
    pub(crate) name: String,
    pub(crate) scope: TokenScope,
    pub(crate) user: Option<UserId>,
    pub(crate) created_at: Timestamp,
}

/// A stored token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientToken {
    pub(crate) id: TokenId,
    pub(crate) name: String,
    pub(crate) scope: TokenScope,
    pub(crate) user: Option<UserId>,
    pub(crate) created_at: Timestamp,
    /// Approximate time of its last request. `None` if it was never used.
    pub(crate) used_at: Option<Timestamp>,
}

/// The threads that a client sees. For the client, others do not exist.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Visibility {
    #[default]
    All,
    /// Threads of one user.
    User(UserId),
}

impl Visibility {
    /// Returns the user whose threads are seen, or `None` if all are.
    pub(crate) fn user(&self) -> Option<&UserId> {
        match self {
            Visibility::All => None,
            Visibility::User(user) => Some(user),
        }
    }

    /// Returns true if threads of `owner` are seen.
    pub(crate) fn includes(&self, owner: Option<&UserId>) -> bool {
        match self {
            Visibility::All => true,
            Visibility::User(user) => owner == Some(user),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_recognised_by_its_form_and_never_printed() {
        let token = new_token([1, 2, 3, u64::MAX]);
        assert!(may_be_created(token.expose()), "{}", token.expose());
        assert_eq!(token.expose().len(), 47);
        for other in ["", "rap_", "rap_short", &token.expose()[1..], &format!("{}x", token.expose())] {
            assert!(!may_be_created(other), "{other}");
        }
        let digest = TokenDigest::of(token.expose());
        assert_eq!(format!("{token:?} {digest:?}"), "Secret(…) TokenDigest(…)");
        assert_ne!(digest, TokenDigest::of("another"));
    }

    #[test]
    fn a_user_sees_only_threads_with_that_user() {
        let [ann, bob] = ["ann", "bob"].map(|user| UserId::new(user).unwrap());
        let of_ann = Visibility::User(ann.clone());
        assert!(of_ann.includes(Some(&ann)));
        assert!(!of_ann.includes(Some(&bob)) && !of_ann.includes(None));
        assert!(Visibility::All.includes(Some(&bob)) && Visibility::All.includes(None));
    }
}
