//! Sign-in to the web interface.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::TokenScope;

/// Request to sign in to the web interface. `Debug` does not print the token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SignIn {
    /// Token of a client.
    pub token: String,
}

impl std::fmt::Debug for SignIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignIn").finish_non_exhaustive()
    }
}

/// The person who uses the web interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct SignInState {
    /// True if the runtime has tokens, so that people have to sign in.
    pub needs_token: bool,
    /// True if the requests of this browser are accepted.
    pub signed_in: bool,
    /// Requests that the person's token permits. Null if nobody is signed in.
    pub scope: Option<TokenScope>,
    /// User whose threads the person sees. Null if all are visible.
    pub user_id: Option<String>,
    /// Names of the configured agents, the default first. Empty if nobody is signed in.
    pub agents: Vec<String>,
    /// Version of the runtime.
    pub version: String,
    /// Reason why signing in failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}
