//! Tokens of clients.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Time;
#[cfg(feature = "schema")]
use crate::request::ID_PATTERN;
use crate::string_enum::string_enum;

/// Maximum length of the name of a token, in characters.
pub const TOKEN_NAME_CHARS: usize = 100;

string_enum! {
    /// Requests that a token permits.
    TokenScope {
        /// Read only: `GET`.
        Read = "read",
        /// Everything except tokens, pruning, and moving sessions.
        Write = "write",
        /// Everything.
        Admin = "admin",
    }
}

impl TokenScope {
    /// Returns true if a token with this scope permits requests that need `needed`.
    pub fn permits(self, needed: TokenScope) -> bool {
        let rank = |scope| TokenScope::ALL.into_iter().position(|known| known == scope);
        rank(self).is_some_and(|own| rank(needed).is_some_and(|needed| own >= needed))
    }
}

/// Request to create a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(feature = "schema", schemars(extend("anyOf" = [
    {"properties": {"scope": {"enum": ["read", "write"]}}},
    {"properties": {"user_id": {"type": "null"}}},
])))]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// Name for people, such as the program that will use the token. Names need not be unique.
    #[cfg_attr(feature = "schema", schemars(length(min = 1, max = TOKEN_NAME_CHARS)))]
    #[cfg_attr(feature = "schema", schemars(regex(pattern = r"^[^\u0000-\u001f\u007f-\u009f]*$")))]
    pub name: String,
    /// Requests that the token permits.
    pub scope: TokenScope,
    /// User whose threads the token sees; all threads if absent. An admin token has no user.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = ID_PATTERN)))]
    pub user_id: Option<String>,
}

/// A created token. `Debug` does not print the token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct CreatedToken {
    /// Id of the token, by which it is listed and revoked.
    pub id: String,
    /// The token. No other answer contains it.
    pub token: String,
    /// True if clients on the runtime's machine need no token, because `server.tokens` is not set.
    #[serde(default)]
    pub open: bool,
}

impl std::fmt::Debug for CreatedToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedToken").field("id", &self.id).field("open", &self.open).finish_non_exhaustive()
    }
}

/// A token as it is listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ListedToken {
    /// Id of the token.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Requests that it permits.
    pub scope: TokenScope,
    /// User whose threads it sees. Null if it sees all threads.
    pub user_id: Option<String>,
    /// Time of its creation.
    pub created_at: Time,
    /// Approximate time of its last request. Null if it was never used.
    pub last_used_at: Option<Time>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_permits_itself_and_smaller_scopes() {
        use TokenScope::{Admin, Read, Unknown, Write};
        let permitted = |scope: TokenScope| [Read, Write, Admin].map(|needed| scope.permits(needed));
        assert_eq!(permitted(Read), [true, false, false]);
        assert_eq!(permitted(Write), [true, true, false]);
        assert_eq!(permitted(Admin), [true, true, true]);
        assert_eq!(permitted(Unknown), [false; 3]);
    }

    #[test]
    fn a_created_token_is_not_printed() {
        let created = CreatedToken { id: "1".into(), token: "rap_s3cret".into(), open: false };
        assert_eq!(format!("{created:?}"), "CreatedToken { id: \"1\", open: false, .. }");
    }
}
