//! Credentials that a client shows to one server.

use std::fmt;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use rap_protocol::{Secret, Timestamp};
use url::Url;

use crate::client::Error;
use crate::hashing::hash;
use crate::oauth::{AccessTokens, OauthClient};
use crate::reloading::{FileError, Reloading, SecretSource, watch_secrets};
use crate::sigv4::AccessKey;
use crate::tls::ClientTls;
use crate::webhook::SigningKeys;

/// Credentials for a server. The default shows none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Credentials in the `Authorization` header.
    pub authorization: Option<Authorization>,
    /// Keys that sign each message. Empty signs none.
    pub hmac: Vec<SecretSource>,
    /// Client certificate, and the authorities of the server's certificate.
    pub tls: Option<ClientTls>,
}

/// Credentials in the `Authorization` header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authorization {
    /// A bearer token.
    Bearer(SecretSource),
    /// Access tokens of an authorization server.
    Oauth(OauthClient),
    /// Signatures with an access key of AWS.
    Sigv4(AccessKey),
}

impl Credentials {
    /// Returns credentials that are a bearer token.
    pub fn bearer(token: Secret) -> Credentials {
        Credentials { authorization: Some(Authorization::Bearer(token.into())), ..Credentials::default() }
    }

    /// Returns true if there is anything to show.
    pub fn is_empty(&self) -> bool {
        *self == Credentials::default()
    }
}

/// A request that is about to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Unsigned<'a> {
    /// Method in capital letters.
    pub method: &'a str,
    /// URL that it is sent to.
    pub url: &'a Url,
    /// Id of the message, the same in each attempt: letters, digits, `_` and `-`. `None` for a request that is no message
    /// and gets no HMAC.
    pub id: Option<&'a str>,
    /// The body.
    pub body: &'a Bytes,
}

/// Makes the headers with which requests to a server show their credentials.
pub struct Signer {
    method: Option<Method>,
    hmac: Option<Reloading<SigningKeys>>,
}

enum Method {
    Bearer(Reloading<HeaderValue>),
    Oauth(Box<AccessTokens>),
    Sigv4(AccessKey),
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer(…)")
    }
}

impl Signer {
    /// Reads the files of the credentials.
    pub fn new(credentials: &Credentials) -> Result<Signer, FileError> {
        let method = match &credentials.authorization {
            None => None,
            Some(Authorization::Bearer(source)) => {
                Some(Method::Bearer(watch_secrets(vec![source.clone()], bearer)?))
            }
            Some(Authorization::Oauth(client)) => {
                Some(Method::Oauth(Box::new(AccessTokens::new(client.clone())?)))
            }
            Some(Authorization::Sigv4(key)) => Some(Method::Sigv4(key.clone())),
        };
        let hmac = (!credentials.hmac.is_empty()).then(|| watch_signing_keys(credentials.hmac.clone()));
        Ok(Signer { method, hmac: hmac.transpose()? })
    }

    /// Returns true if messages get an HMAC, and so need an id.
    pub fn signs_messages(&self) -> bool {
        self.hmac.is_some()
    }

    /// Returns the headers for a request.
    pub async fn headers(
        &self,
        request: Unsigned<'_>,
        now: Timestamp,
    ) -> Result<Vec<(HeaderName, HeaderValue)>, Error> {
        let Unsigned { method, url, id, body } = request;
        let mut headers = match &self.method {
            None => Vec::new(),
            Some(Method::Bearer(header)) => vec![(header::AUTHORIZATION, header.get().as_ref().clone())],
            Some(Method::Oauth(tokens)) => {
                vec![(header::AUTHORIZATION, tokens.header().await.map_err(Error::Credentials)?)]
            }
            Some(Method::Sigv4(key)) => {
                let (key, method, url, body) = (key.clone(), method.to_owned(), url.clone(), body.clone());
                hash(body.len(), move || key.sign(&method, &url, &body, now)).await
            }
        };
        if let (Some(keys), Some(id)) = (&self.hmac, id) {
            let (keys, id, body) = (keys.get(), id.to_owned(), body.clone());
            headers.extend(hash(body.len(), move || keys.sign(&id, now, &body)).await);
        }
        Ok(headers)
    }

    /// Handles a 401 to a request with these headers. Returns true if the request is worth one more attempt, with new
    /// credentials.
    pub async fn renew(&self, refused: &[(HeaderName, HeaderValue)]) -> bool {
        let Some(Method::Oauth(tokens)) = &self.method else { return false };
        for (_, value) in refused.iter().filter(|(name, _)| *name == header::AUTHORIZATION) {
            tokens.forget(value).await;
        }
        true
    }
}

/// Reads signing keys from their sources, and again when a file changes.
pub fn watch_signing_keys(sources: Vec<SecretSource>) -> Result<Reloading<SigningKeys>, FileError> {
    watch_secrets(sources, |secrets| SigningKeys::parse(secrets).map_err(|bad| bad.to_string()))
}

fn bearer(secrets: &[Secret]) -> Result<HeaderValue, String> {
    let token = secrets.first().map(Secret::expose).unwrap_or_default();
    let value = HeaderValue::try_from(format!("Bearer {token}"));
    let mut value =
        value.map_err(|_| "the bearer token cannot be sent: it has line breaks or control characters")?;
    value.set_sensitive(true);
    Ok(value)
}
