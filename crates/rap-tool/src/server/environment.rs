//! Settings of a server in environment variables.

use std::env;
use std::path::PathBuf;

use rap_io::tls::{ClientCertificates, ClientTls, ServerTls};
use rap_protocol::{Secret, UrlPolicy};

use super::{CallbacksTo, JournalLocation, ToolServer};
use crate::auth::Auth;

/// Name of the caller whose credentials are in the environment.
const ENVIRONMENT: &str = "environment";

const TLS_PAIR: &str = "RAP_TOOL_TLS_CERT and RAP_TOOL_TLS_KEY";
const CALLBACK_PAIR: &str = "RAP_TOOL_CALLBACK_CERT and RAP_TOOL_CALLBACK_KEY";

impl ToolServer {
    /// Applies the environment variables `RAP_TOOL_DATA`, `RAP_TOOL_KEY`, `RAP_TOOL_URL`, `RAP_TOOL_CONSENT_URL`
    /// ([`ToolServer::consent_url`]) and `RAP_TOOL_CALLBACKS_TO` (`public`, `private` or `loopback`), which override
    /// the settings made so far, and adds the tokens in `RAP_TOOL_BEARER`, which are separated by commas. Each token is
    /// a separate caller; see [`Auth::Bearer`].
    ///
    /// `RAP_TOOL_BEARER_FILE` is a file for [`Auth::BearerFile`]; `RAP_TOOL_HMAC` has keys for [`Auth::Hmac`], separated by
    /// commas, and `RAP_TOOL_HMAC_FILE` is a file for [`Auth::HmacFile`]. `RAP_TOOL_TLS_CERT` and `RAP_TOOL_TLS_KEY` are the
    /// files for [`ToolServer::tls`]; with `RAP_TOOL_TLS_CLIENT_CA`, callers with a certificate of that authority are
    /// accepted. `RAP_TOOL_CALLBACK_CERT`, `RAP_TOOL_CALLBACK_KEY` and `RAP_TOOL_CALLBACK_CA` are the files for
    /// [`ToolServer::callback_tls`]. `RAP_TOOL_MIGRATION_KEY` is the key of [`ToolServer::migrate_calls`].
    #[must_use]
    pub fn with_environment(mut self) -> Self {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        // A value that is not UTF-8 must not be ignored. With the replacement character in it, it is rejected later.
        let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
        if let Some(directory) = variable("RAP_TOOL_DATA") {
            self.journal = JournalLocation::Directory(directory.into());
        }
        self.key = text("RAP_TOOL_KEY").map(Secret::new).or(self.key);
        self.migration_key = text("RAP_TOOL_MIGRATION_KEY").map(Secret::new).or(self.migration_key);
        self.public_url = text("RAP_TOOL_URL").or(self.public_url);
        self.consent_url = text("RAP_TOOL_CONSENT_URL").or(self.consent_url);
        if let Some(name) = text("RAP_TOOL_CALLBACKS_TO") {
            let policy = UrlPolicy::from_name(&name);
            self.callbacks_to = policy.map_or(CallbacksTo::Invalid, CallbacksTo::Policy);
        }
        let list = |text: String| text.split(',').map(|item| item.trim().to_owned()).collect::<Vec<_>>();
        let tokens = text("RAP_TOOL_BEARER").map(list).unwrap_or_default();
        self.auth.extend(tokens.into_iter().map(Auth::Bearer));
        if let Some(file) = variable("RAP_TOOL_BEARER_FILE").map(PathBuf::from) {
            self.auth.push(Auth::BearerFile { caller: ENVIRONMENT.into(), file });
        }
        if let Some(keys) = text("RAP_TOOL_HMAC").map(list) {
            self.auth.push(Auth::Hmac { caller: ENVIRONMENT.into(), keys });
        }
        if let Some(file) = variable("RAP_TOOL_HMAC_FILE").map(PathBuf::from) {
            self.auth.push(Auth::HmacFile { caller: ENVIRONMENT.into(), file });
        }
        let file = |name| variable(name).map(PathBuf::from);
        let client_ca = file("RAP_TOOL_TLS_CLIENT_CA");
        if let Some((cert, key)) = self.pair(file("RAP_TOOL_TLS_CERT"), file("RAP_TOOL_TLS_KEY"), TLS_PAIR) {
            let clients = ClientCertificates::Optional;
            if client_ca.is_some() {
                self.auth.push(Auth::MutualTls { names: Vec::new() });
            }
            self.tls = Some(ServerTls { cert, key, client_ca, clients });
        } else if client_ca.is_some() {
            self.incomplete_environment = Some("RAP_TOOL_TLS_CERT and RAP_TOOL_TLS_CLIENT_CA");
        }
        let (cert, key) = (file("RAP_TOOL_CALLBACK_CERT"), file("RAP_TOOL_CALLBACK_KEY"));
        let identity = self.pair(cert, key, CALLBACK_PAIR);
        let ca = file("RAP_TOOL_CALLBACK_CA");
        if identity.is_some() || ca.is_some() {
            self.callback_tls = Some(ClientTls { identity, ca });
        }
        self
    }

    /// Returns both values, or none and remembers the mistake if there is only one.
    fn pair(
        &mut self,
        first: Option<PathBuf>,
        second: Option<PathBuf>,
        names: &'static str,
    ) -> Option<(PathBuf, PathBuf)> {
        if first.is_some() != second.is_some() {
            self.incomplete_environment = Some(names);
        }
        first.zip(second)
    }
}
