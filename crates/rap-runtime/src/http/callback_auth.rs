//! Credentials of callbacks, for tool servers that have to show some besides the callback URL.

use std::collections::HashMap;

use axum::http::{HeaderMap, StatusCode};
use rap_io::credentials::watch_signing_keys;
use rap_io::proxy::TrustedProxies;
use rap_io::reloading::Reloading;
use rap_io::serve::Peer;
use rap_io::webhook::{AcceptedMessages, SigningKeys};
use rap_protocol::Timestamp;
use url::Url;

use super::ErrorResponse;
use crate::settings::{CallbackAuth, SettingsError, ToolServer};

/// Credentials that the callbacks of each tool server have to show.
#[derive(Default)]
pub(crate) struct CallbackRequirements {
    servers: HashMap<String, Requirement>,
    proxies: Option<TrustedProxies>,
    accepted: AcceptedMessages,
}

enum Requirement {
    Signature(Reloading<SigningKeys>),
    /// A certificate with this name.
    Certificate(String),
}

/// A callback whose credentials are valid.
pub(crate) struct Verified {
    /// Id of the signed message, together with its call.
    message: Option<String>,
}

impl CallbackRequirements {
    pub(crate) fn new(
        servers: &[ToolServer],
        proxies: Option<&TrustedProxies>,
    ) -> Result<CallbackRequirements, SettingsError> {
        let mut requirements = HashMap::new();
        for server in servers {
            let requirement = match server.callback_auth {
                None => continue,
                Some(CallbackAuth::Hmac) => {
                    let failed = |why: String| SettingsError::Credentials { server: server.url.clone(), why };
                    let keys = watch_signing_keys(server.credentials.hmac.clone());
                    Requirement::Signature(keys.map_err(|error| failed(error.to_string()))?)
                }
                Some(CallbackAuth::Tls) => {
                    let host = Url::parse(&server.url).ok().and_then(|url| url.host_str().map(str::to_owned));
                    Requirement::Certificate(host.unwrap_or_default())
                }
            };
            requirements.insert(server.url.clone(), requirement);
        }
        let (proxies, accepted) = (proxies.cloned(), AcceptedMessages::default());
        Ok(CallbackRequirements { servers: requirements, proxies, accepted })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }

    /// Checks the credentials of a callback for a call of this server.
    pub(crate) fn verify(
        &self,
        server: &str,
        call: &str,
        (headers, peer): (&HeaderMap, Option<&Peer>),
        body: &[u8],
        now: Timestamp,
    ) -> Result<Verified, ErrorResponse> {
        match self.servers.get(server) {
            None => Ok(Verified { message: None }),
            Some(Requirement::Signature(keys)) => match keys.get().verify(headers, body, now) {
                Ok(id) => Ok(Verified { message: Some(format!("{call} {id}")) }),
                Err(refused) => Err(unauthorized("bad_signature", refused.to_string())),
            },
            Some(Requirement::Certificate(host)) => {
                let has_name = |peer: &Peer| {
                    let own = peer.certificate.as_ref();
                    let passed_on = self.proxies.as_ref().and_then(|proxies| proxies.identity(peer, headers));
                    own.is_some_and(|own| own.names.contains(host)) || passed_on == Some(host.as_str())
                };
                if peer.is_some_and(has_name) {
                    return Ok(Verified { message: None });
                }
                let message = format!("a callback of this call has to show a client certificate for {host}");
                Err(unauthorized("bad_certificate", message))
            }
        }
    }

    /// Returns true if the same signed message was accepted before.
    pub(crate) fn is_repeated(&self, verified: &Verified) -> bool {
        verified.message.as_ref().is_some_and(|message| self.accepted.contains(message))
    }

    /// Remembers a message that was accepted.
    pub(crate) fn remember(&self, verified: Verified, now: Timestamp) {
        if let Some(message) = verified.message {
            self.accepted.insert(message, now);
        }
    }
}

fn unauthorized(code: &'static str, message: String) -> ErrorResponse {
    ErrorResponse::new(StatusCode::UNAUTHORIZED, code, message)
}
