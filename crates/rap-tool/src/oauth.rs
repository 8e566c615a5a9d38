//! OAuth 2.0 for tools: the authorization code grant with PKCE, one token for each user.
//!
//! [`Call::access_token`] returns a token of the user on whose behalf the call is made. If there is none, it asks the
//! user to sign in and continues after the consent, even after a restart. Tokens are stored encrypted with the key of
//! the journal, and renewed shortly before they expire.
//!
//! The redirect URL is the same for all calls, so that it can be registered. The `state` of a request names its call and
//! cannot be guessed. The PKCE verifier is derived from the key of the journal and never leaves the server before the code
//! is exchanged.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{fs, io};

use axum::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderValue, Method};
use bytes::Bytes;
use rap_io::client::{Client, ClientLimits};
use rap_io::secret_box::Key;
use rap_protocol::{Secret, UrlRules};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use url::{Url, form_urlencoded};

use crate::call::Call;
use crate::error::Error;

/// Time for a request to the authorization server.
const REQUEST_WITHIN: Duration = Duration::from_secs(30);
/// Maximum size of an answer of the authorization server, in bytes.
const ANSWER_BYTES: usize = 256 * 1024;
/// Maximum length of a token, in bytes.
const TOKEN_BYTES: usize = 16 * 1024;
/// Time before its expiry from which a token is not used any more.
const MARGIN_MS: i64 = 60_000;
/// Lifetime of a token that states none.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(60 * 60);
/// Longest lifetime that is believed.
const MAX_LIFETIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum number of sign-ins of one call.
const MAX_SIGN_INS: u32 = 10;
/// Maximum number of owners whose tokens are in memory.
const CACHED: usize = 10_000;
/// Error codes of RFC 6749. The authorization server's other words may repeat secrets and are not passed on.
const CODES: [&str; 7] = [
    "invalid_request",
    "invalid_client",
    "invalid_grant",
    "unauthorized_client",
    "unsupported_grant_type",
    "invalid_scope",
    "invalid_target",
];

/// A client of an authorization server that users sign in to.
///
/// ```
/// use rap_tool::OauthApp;
///
/// let app = OauthApp::new("https://login.example/authorize", "https://login.example/token", "my-client")?
///     .secret("s3cret")
///     .scope("calendar.read");
/// # Ok::<(), rap_tool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct OauthApp {
    authorize_url: Url,
    token_url: Url,
    client_id: String,
    secret: Option<Secret>,
    /// The secret is sent in a header instead of the body.
    secret_in_header: bool,
    scope: Option<String>,
    resource: Option<String>,
    /// Issuer that the redirect has to name, if it names one.
    issuer: Option<String>,
}

impl OauthApp {
    /// Creates a public client. Both URLs are https, or http on this machine.
    pub fn new(authorize_url: &str, token_url: &str, client_id: impl Into<String>) -> Result<Self, Error> {
        let checked = |text: &str| {
            let url = Url::parse(text).ok();
            let url = url.filter(|url| {
                url.scheme() == "https" || url.scheme() == "http" && rap_protocol::url::is_on_loopback(url)
            });
            url.ok_or_else(|| Error::new("the URLs of an authorization server are https URLs"))
        };
        Ok(OauthApp {
            authorize_url: checked(authorize_url)?,
            token_url: checked(token_url)?,
            client_id: client_id.into(),
            secret: None,
            secret_in_header: false,
            scope: None,
            resource: None,
            issuer: None,
        })
    }

    /// Sets the secret of a confidential client. It is sent in the body of token requests.
    #[must_use]
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(Secret::new(secret));
        self
    }

    /// Sends the secret in the header `Authorization` of token requests (`client_secret_basic`) instead of the body.
    #[must_use]
    pub fn secret_in_header(mut self) -> Self {
        self.secret_in_header = true;
        self
    }

    /// Sets the scopes to ask for, separated by spaces.
    #[must_use]
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// Adds scopes to ask for, separated by spaces, which a server has asked for.
    #[must_use]
    pub fn add_scope(mut self, more: &str) -> Self {
        let scope = self.scope.take().unwrap_or_default();
        let mut scopes: Vec<&str> = scope.split_whitespace().collect();
        for more in more.split_whitespace() {
            if !scopes.contains(&more) {
                scopes.push(more);
            }
        }
        self.scope = Some(scopes.join(" "));
        self
    }

    /// Sets the server that the tokens are for (RFC 8707).
    #[must_use]
    pub fn resource(mut self, resource: impl Into<String>) -> Self {
        self.resource = Some(resource.into());
        self
    }

    /// Sets the issuer. A redirect that names another one is refused (RFC 9207).
    #[must_use]
    pub fn issuer(mut self, issuer: impl Into<String>) -> Self {
        self.issuer = Some(issuer.into());
        self
    }

    /// Returns the URL of the page on which the user signs in.
    fn sign_in_url(&self, redirect: &str, state: &str, verifier: &str) -> String {
        let mut url = self.authorize_url.clone();
        let challenge = base64url(&Sha256::digest(verifier.as_bytes()));
        let mut query = url.query_pairs_mut();
        query.append_pair("response_type", "code").append_pair("client_id", &self.client_id);
        query.append_pair("redirect_uri", redirect).append_pair("state", state);
        query.append_pair("code_challenge", &challenge).append_pair("code_challenge_method", "S256");
        for (name, value) in [("scope", &self.scope), ("resource", &self.resource)] {
            if let Some(value) = value {
                query.append_pair(name, value);
            }
        }
        drop(query);
        url.into()
    }

    /// Returns the names that it shows to the authorization server.
    fn registration(&self) -> Registration {
        let secret = self.secret.as_ref().map(|secret| secret.expose().to_owned());
        Registration { client_id: self.client_id.clone(), secret }
    }

    /// Returns the body of a token request.
    fn form(&self, client: &Registration, grant: &[(&str, &str)]) -> Bytes {
        let mut form = form_urlencoded::Serializer::new(String::new());
        form.extend_pairs(grant);
        match &client.secret {
            Some(_) if self.secret_in_header => {}
            Some(secret) => {
                form.append_pair("client_id", &client.client_id).append_pair("client_secret", secret);
            }
            None => {
                form.append_pair("client_id", &client.client_id);
            }
        }
        if let Some(resource) = &self.resource {
            form.append_pair("resource", resource);
        }
        Bytes::from(form.finish())
    }

    async fn request(
        &self,
        http: &Client,
        client: Registration,
        grant: &[(&str, &str)],
        now: i64,
    ) -> Result<Token, Refusal> {
        let body = self.form(&client, grant);
        let mut headers = vec![
            (CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded")),
            (ACCEPT, HeaderValue::from_static("application/json")),
        ];
        if let Some(secret) = client.secret.as_ref().filter(|_| self.secret_in_header) {
            headers.push((AUTHORIZATION, basic(&client.client_id, secret)));
        }
        let answer = http.request(Method::POST, &self.token_url, &headers, body, ANSWER_BYTES).await;
        let answer = answer.map_err(|error| Refusal::Unavailable(error.to_string()))?;
        match answer.status {
            200 => Token::of(&answer.body, client, now).map_err(Refusal::Unavailable),
            400 | 401 => {
                let said: Denied = serde_json::from_slice(&answer.body).unwrap_or_default();
                let code = CODES.into_iter().find(|code| *code == said.error);
                Err(Refusal::Denied(code.unwrap_or("an unknown error")))
            }
            status => Err(Refusal::Unavailable(format!("it answered {status}"))),
        }
    }
}

/// Reason why there is no token.
enum Refusal {
    /// The authorization server refused, with this code.
    Denied(&'static str),
    /// It could not be asked, or answered something else.
    Unavailable(String),
}

#[derive(Default, Deserialize)]
struct Denied {
    #[serde(default)]
    error: String,
}

#[derive(Deserialize)]
struct Granted {
    access_token: String,
    token_type: String,
    expires_in: Option<f64>,
    refresh_token: Option<String>,
}

/// Registration of a client at an authorization server.
#[derive(Clone, Serialize, Deserialize)]
struct Registration {
    client_id: String,
    secret: Option<String>,
}

/// A token of a user, as it is stored.
#[derive(Clone, Serialize, Deserialize)]
struct Token {
    access: String,
    refresh: Option<String>,
    /// The client that it was issued to. A client that registers dynamically has another id later.
    client: Registration,
    /// In milliseconds since 1970.
    expires_at: i64,
}

impl Token {
    fn of(body: &[u8], client: Registration, now: i64) -> Result<Token, String> {
        let granted: Granted =
            serde_json::from_slice(body).map_err(|_| "its answer is not a token".to_owned())?;
        if !granted.token_type.eq_ignore_ascii_case("bearer") {
            return Err("its token is not a bearer token".into());
        }
        let is_token = |text: &String| {
            (1..=TOKEN_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
        };
        if !is_token(&granted.access_token)
            || granted.refresh_token.as_ref().is_some_and(|token| !is_token(token))
        {
            return Err("its token has characters that no token has, or is too long".into());
        }
        let lifetime = granted.expires_in.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let lifetime = lifetime.unwrap_or(DEFAULT_LIFETIME).min(MAX_LIFETIME);
        let expires_at = now.saturating_add(i64::try_from(lifetime.as_millis()).unwrap_or(i64::MAX));
        Ok(Token { access: granted.access_token, refresh: granted.refresh_token, client, expires_at })
    }
}

/// The tokens of all users.
pub(crate) struct Tokens {
    /// `None` keeps them in memory.
    directory: Option<PathBuf>,
    key: Key,
    http: std::sync::OnceLock<Client>,
    /// Held while a token is used or requested, so that each is requested once.
    owners: std::sync::Mutex<HashMap<String, Arc<Mutex<Option<Token>>>>>,
}

impl Tokens {
    pub(crate) fn new(data: Option<&Path>, key: Key) -> Tokens {
        let directory = data.map(|data| data.join("oauth"));
        Tokens { directory, key, http: std::sync::OnceLock::new(), owners: std::sync::Mutex::default() }
    }

    fn http(&self) -> &Client {
        let limits = ClientLimits { total: REQUEST_WITHIN, ..ClientLimits::default() };
        self.http.get_or_init(|| Client::new(UrlRules::unrestricted(), limits))
    }

    /// Returns the place of a token. Its name tells nothing about its owner.
    fn place(&self, call: &Call, app: &OauthApp) -> String {
        let owner = call.token_owner();
        let parts: [&[u8]; 5] = [
            b"oauth",
            call.thread().caller().bytes(),
            owner.as_bytes(),
            app.token_url.as_str().as_bytes(),
            app.resource.as_deref().unwrap_or_default().as_bytes(),
        ];
        self.key.mac(&parts)[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn entry(&self, place: &str) -> Arc<Mutex<Option<Token>>> {
        let mut owners = self.owners.lock().expect("bug: nothing panics under a lock");
        if self.directory.is_some() && owners.len() >= CACHED {
            owners.retain(|_, token| Arc::strong_count(token) > 1);
        }
        let load = || Arc::new(Mutex::new(self.load(place)));
        Arc::clone(owners.entry(place.to_owned()).or_insert_with(load))
    }

    fn load(&self, place: &str) -> Option<Token> {
        let sealed = fs::read(self.directory.as_ref()?.join(place)).ok()?;
        let plain = self.key.open(&sealed, place.as_bytes()).ok()?;
        serde_json::from_slice(&plain).ok()
    }

    fn store(&self, place: &str, token: &Token) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let Some(directory) = &self.directory else { return Ok(()) };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let sealed = self.key.seal(&serde_json::to_vec(token)?, place.as_bytes());
        let new = directory.join(format!("{place}.new"));
        fs::write(&new, sealed)?;
        fs::rename(new, directory.join(place))
    }

    fn remove(&self, place: &str) {
        if let Some(directory) = &self.directory {
            // There may be none.
            fs::remove_file(directory.join(place)).ok();
        }
    }
}

impl Call {
    /// Returns the URL to register as the redirect URL of an [`OauthApp`]. It is the same for all calls.
    pub fn oauth_redirect_url(&self) -> String {
        self.engine().oauth_redirect_url()
    }

    /// Returns an access token of the user on whose behalf the call is made; without a user, of the session.
    ///
    /// If there is none, the user is asked to sign in, and the call continues after that. A token that expires is
    /// renewed. An error says why there is no token, such as that the user refused.
    ///
    /// If a server refuses the token, call [`Call::forget_token`] before this method again.
    pub async fn access_token(&self, app: &OauthApp) -> Result<Secret, Error> {
        let tokens = &self.engine().tokens;
        let place = tokens.place(self, app);
        let entry = tokens.entry(&place);
        // A user who signs in may take long, so others with the same token wait for nothing else.
        let mut token = entry.lock().await;
        let now = self.engine().now().0;
        if let Some(token) = token.as_ref().filter(|token| now < token.expires_at.saturating_sub(MARGIN_MS)) {
            return Ok(Secret::new(token.access.as_str()));
        }
        let renewable = token.as_ref().and_then(|token| Some((token.refresh.clone()?, token.client.clone())));
        if let Some((refresh, client)) = renewable {
            let grant = [("grant_type", "refresh_token"), ("refresh_token", refresh.as_str())];
            match app.request(tokens.http(), client, &grant, now).await {
                Ok(mut renewed) => {
                    renewed.refresh = renewed.refresh.or(Some(refresh));
                    return Ok(keep(tokens, &place, &mut token, renewed));
                }
                Err(Refusal::Unavailable(why)) => {
                    return Err(Error::new(format!(
                        "the authorization server could not be asked: {why}; try again later"
                    )));
                }
                // The user has to sign in again.
                Err(Refusal::Denied(_)) => {}
            }
        }
        *token = None;
        tokens.remove(&place);
        let signed_in = Box::pin(self.sign_in(app)).await?;
        Ok(keep(tokens, &place, &mut token, signed_in))
    }

    /// Forgets the token of the user, because a server has refused it. The next [`Call::access_token`] renews it, or
    /// asks the user to sign in again.
    pub async fn forget_token(&self, app: &OauthApp, refused: &Secret) {
        let tokens = &self.engine().tokens;
        let place = tokens.place(self, app);
        let entry = tokens.entry(&place);
        let mut token = entry.lock().await;
        if let Some(token) = token.as_mut().filter(|token| token.access == refused.expose()) {
            token.expires_at = 0;
            if let Err(error) = tokens.store(&place, token) {
                tracing::warn!(%error, "a token could not be stored");
            }
        }
    }

    /// Removes the token of the user, because it does not permit what a server asks for. The next
    /// [`Call::access_token`] asks the user to sign in again.
    pub async fn remove_token(&self, app: &OauthApp, insufficient: &Secret) {
        let tokens = &self.engine().tokens;
        let place = tokens.place(self, app);
        let entry = tokens.entry(&place);
        let mut token = entry.lock().await;
        if token.as_ref().is_some_and(|token| token.access == insufficient.expose()) {
            *token = None;
            tokens.remove(&place);
        }
    }

    async fn sign_in(&self, app: &OauthApp) -> Result<Token, Error> {
        loop {
            let number = self.run().sign_ins.fetch_add(1, Ordering::Relaxed);
            if number >= MAX_SIGN_INS {
                return Err(Error::new("the user was asked to sign in too often in this call"));
            }
            // Otherwise the consent was given before a restart, and its token as well, which a server has refused since
            // then.
            if let Some(token) = self.sign_in_once(app, number).await? {
                return Ok(token);
            }
        }
    }

    /// Asks for the sign-in of this number. Returns `None` if its code was used before.
    async fn sign_in_once(&self, app: &OauthApp, number: u32) -> Result<Option<Token>, Error> {
        let (redirect, state) = (self.oauth_redirect_url(), self.consent_path(number));
        let verifier = self.pkce_verifier();
        let url = app.sign_in_url(&redirect, &state, &verifier);
        let (consent, asked_before) = self.authorize_numbered(url, number).await?;
        if let (Some(expected), Some(named)) = (&app.issuer, consent.get("iss"))
            && expected != named
        {
            return Err(Error::new(
                "the answer came from another authorization server than the one that was asked",
            ));
        }
        let code =
            consent.get("code").ok_or_else(|| Error::new("the authorization server returned no code"))?;
        let grant = [
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", redirect.as_str()),
            ("code_verifier", verifier.as_str()),
        ];
        let now = self.engine().now().0;
        let http = self.engine().tokens.http();
        match app.request(http, app.registration(), &grant, now).await {
            Ok(token) => Ok(Some(token)),
            Err(Refusal::Denied(_)) if asked_before => Ok(None),
            Err(Refusal::Denied(code)) => {
                Err(Error::new(format!("the authorization server refused the sign-in: {code}")))
            }
            Err(Refusal::Unavailable(why)) => Err(Error::new(format!(
                "the sign-in could not be completed: {why}; ask the user to try again"
            ))),
        }
    }
}

/// Returns the credentials of a client as RFC 6749, section 2.3.1, wants them.
fn basic(client_id: &str, secret: &str) -> HeaderValue {
    use base64::Engine;
    let encoded = |text: &str| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
    let pair = format!("{}:{}", encoded(client_id), encoded(secret));
    let value = format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair));
    let mut value = HeaderValue::try_from(value).expect("bug: base64 is a valid header value");
    value.set_sensitive(true);
    value
}

/// Stores a token and returns it.
fn keep(tokens: &Tokens, place: &str, slot: &mut Option<Token>, token: Token) -> Secret {
    if let Err(error) = tokens.store(place, &token) {
        tracing::warn!(%error, "a token could not be stored; the user will have to sign in again after a restart");
    }
    let access = Secret::new(token.access.as_str());
    *slot = Some(token);
    access
}

/// Encodes bytes as base64 for URLs, without padding.
fn base64url(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_challenge_is_the_hash_of_the_verifier() {
        // From RFC 7636, appendix B.
        let verifier = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";
        let challenge = base64url(&Sha256::digest(verifier.as_bytes()));
        assert_eq!(challenge, "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM");
    }

    #[test]
    fn scopes_are_added_once() {
        let app = OauthApp::new("https://login.example/a", "https://login.example/t", "c").unwrap();
        let app = app.add_scope("read").add_scope("write read");
        assert_eq!(app.scope.as_deref(), Some("read write"));
    }

    #[test]
    fn a_secret_is_in_the_body_or_in_the_header() {
        let app = OauthApp::new("https://login.example/a", "https://login.example/t", "me").unwrap();
        let client =
            |secret: Option<&str>| Registration { client_id: "me".into(), secret: secret.map(Into::into) };
        assert_eq!(app.form(&client(None), &[("a", "b")]), "a=b&client_id=me");
        assert_eq!(app.form(&client(Some("s")), &[]), "client_id=me&client_secret=s");
        let app = app.secret_in_header();
        assert_eq!(app.form(&client(Some("s")), &[("a", "b")]), "a=b");
        assert_eq!(app.form(&client(None), &[]), "client_id=me");
        // me:s%3A%2F
        assert_eq!(basic("me", "s:/"), "Basic bWU6cyUzQSUyRg==");
    }

    #[test]
    fn only_plain_bearer_tokens_are_accepted() {
        let client = || Registration { client_id: "c".into(), secret: None };
        let of = |text: &str| Token::of(text.as_bytes(), client(), 1_000);
        let good =
            of(r#"{"access_token": "a", "token_type": "Bearer", "expires_in": 5, "refresh_token": "r"}"#)
                .ok()
                .unwrap();
        assert_eq!((good.expires_at, good.refresh.as_deref()), (6_000, Some("r")));
        for wrong in [
            r#"{"access_token": "a", "token_type": "mac"}"#,
            r#"{"access_token": "a b", "token_type": "bearer"}"#,
            r#"{"access_token": "", "token_type": "bearer"}"#,
            "<html>",
        ] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
