//! Authentication of callers.
//!
//! Tokens and signatures are compared in constant time. Stored data never contains a token or a key: a caller is identified
//! by a keyed hash of its token or its name.

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use rap_io::credentials::watch_signing_keys;
use rap_io::introspection::{AuthorizationServer, Introspection, NotAccepted};
use rap_io::proxy::TrustedProxies;
use rap_io::reloading::{Reloading, SecretSource, watch_secrets};
use rap_io::secret_box::Key;
use rap_io::serve::Peer;
use rap_io::sigv4::{self, AccessKey};
use rap_io::webhook::{self, AcceptedMessages, SigningKeys};
use rap_protocol::{Secret, Timestamp};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::ServeError;

/// Authentication of the callers of a server. A server can have several: a request needs one of them.
#[derive(Clone)]
#[non_exhaustive]
pub enum Auth {
    /// Callers send this token in an `Authorization: Bearer` header. A server can have several tokens. Each token is
    /// a separate caller, and callers have no access to each other's calls and threads.
    Bearer(String),
    /// Callers send a token of this file. All tokens in it, one in each line, are one caller. The file is read again when it
    /// changes, so that tokens can be replaced.
    BearerFile {
        /// Name of the caller. With another name it would be another caller.
        caller: String,
        /// Path of the file.
        file: PathBuf,
    },
    /// Callers sign invocations and notifications in the form of Standard Webhooks, and callbacks to them are signed with
    /// the same keys. All keys are one caller.
    Hmac {
        /// Name of the caller. With another name it would be another caller.
        caller: String,
        /// One to four keys: `whsec_` and base64.
        keys: Vec<String>,
    },
    /// Like [`Auth::Hmac`], with the keys in a file, one in each line, which is read again when it changes.
    HmacFile {
        /// Name of the caller. With another name it would be another caller.
        caller: String,
        /// Path of the file.
        file: PathBuf,
    },
    /// Callers sign requests with this access key, by AWS Signature Version 4. Each access key is a caller.
    Sigv4 {
        /// Public name of the access key.
        access_key_id: String,
        /// The access key.
        secret_access_key: String,
        /// Region in the signatures.
        region: String,
        /// Service in the signatures.
        service: String,
    },
    /// Callers send an OAuth 2.0 access token, for example one of the client credentials grant. Its authorization server is
    /// asked about each token (RFC 7662), and the answer is used for up to a minute. Each client is a caller.
    Oauth {
        /// The authorization server.
        server: AuthorizationServer,
        /// Ids of the clients that are accepted.
        clients: Vec<String>,
    },
    /// Callers show a client certificate that the authority in [`ServerTls::client_ca`](crate::ServerTls::client_ca) has
    /// signed. Each name in a certificate is a caller; the first URI or DNS name counts.
    MutualTls {
        /// Names of the callers that are accepted. Empty accepts every certificate of the authority.
        names: Vec<String>,
    },
    /// A proxy in front of this server verifies client certificates and passes the name in them on in a header. The header
    /// is ignored if the request does not come from the proxy. The proxy has to remove the header from requests of others.
    ProxyHeader {
        /// Name of the header.
        header: String,
        /// Addresses or networks of the proxies: `10.0.0.7`, `10.0.0.0/24`.
        proxies: Vec<String>,
        /// Names of the callers that are accepted. Empty accepts every name.
        names: Vec<String>,
    },
    /// Everyone who can reach the server may call its tools. Without this, a server that has no authentication binds only to
    /// loopback addresses.
    OpenToAnyone,
}

impl Auth {
    /// Returns the secrets in this value. Those in files may change and are not among them.
    pub(crate) fn secrets(&self) -> Vec<Secret> {
        match self {
            Auth::Bearer(secret) | Auth::Sigv4 { secret_access_key: secret, .. } => vec![Secret::new(secret)],
            Auth::Hmac { keys, .. } => keys.iter().map(Secret::new).collect(),
            Auth::BearerFile { .. }
            | Auth::HmacFile { .. }
            | Auth::Oauth { .. }
            | Auth::MutualTls { .. }
            | Auth::ProxyHeader { .. }
            | Auth::OpenToAnyone => Vec::new(),
        }
    }
}

/// Contains no secret.
impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Auth::Bearer(_) => "Bearer(…)",
            Auth::BearerFile { .. } => "BearerFile(…)",
            Auth::Hmac { .. } => "Hmac(…)",
            Auth::HmacFile { .. } => "HmacFile(…)",
            Auth::Sigv4 { .. } => "Sigv4(…)",
            Auth::Oauth { .. } => "Oauth(…)",
            Auth::MutualTls { .. } => "MutualTls(…)",
            Auth::ProxyHeader { .. } => "ProxyHeader(…)",
            Auth::OpenToAnyone => "OpenToAnyone",
        })
    }
}

/// An authenticated caller. All anonymous requests belong to one caller.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Caller([u8; 16]);

impl Caller {
    const ANONYMOUS: Caller = Caller([0; 16]);

    fn of(key: &Key, parts: &[&[u8]]) -> Caller {
        Caller(*key.mac(parts).first_chunk().expect("bug: a MAC has 32 bytes"))
    }

    fn named(key: &Key, kind: &str, name: &str) -> Caller {
        Caller::of(key, &[b"named caller", kind.as_bytes(), name.as_bytes()])
    }

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

type TokenDigest = [u8; 32];

pub(crate) struct Callers {
    /// SHA-256 of the tokens of each caller.
    tokens: Vec<(Reloading<Vec<TokenDigest>>, Caller)>,
    hmac: Vec<(Reloading<SigningKeys>, Caller)>,
    sigv4: Vec<(AccessKey, Caller)>,
    /// Authorization servers, and the clients that are accepted of each.
    oauth: Vec<(Introspection, HashSet<String>)>,
    /// Names of accepted client certificates. `None` accepts no certificate.
    certificates: Option<Names>,
    proxies: Option<(TrustedProxies, Names)>,
    key: Key,
    accepted: AcceptedMessages,
    /// Callers with the tokens or names that other servers may know them by.
    labels: Vec<(Vec<u8>, Caller)>,
}

/// Names of callers that are accepted. Empty accepts every name.
struct Names(HashSet<String>);

impl Names {
    fn accept(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.contains(name)
    }
}

/// Caller of a request, as far as the head of the request shows it.
pub(crate) enum CallerInHead {
    Known(Caller),
    /// The request has a signature, which can be checked when its body has arrived.
    Signed,
    /// The request has this access token, which an authorization server has to be asked about.
    Token(Secret),
}

/// Caller of a signed request, and the id of its message if it has one.
pub(crate) struct Signed {
    pub(crate) caller: Caller,
    pub(crate) message: Option<String>,
}

impl Callers {
    pub(crate) fn new(methods: &[Auth], key: &Key) -> Result<Self, ServeError> {
        let mut callers = Callers {
            tokens: Vec::new(),
            hmac: Vec::new(),
            sigv4: Vec::new(),
            oauth: Vec::new(),
            certificates: None,
            proxies: None,
            key: key.clone(),
            accepted: AcceptedMessages::default(),
            labels: Vec::new(),
        };
        methods.iter().try_for_each(|method| callers.add(method))?;
        Ok(callers)
    }

    fn add(&mut self, method: &Auth) -> Result<(), ServeError> {
        let key = self.key.clone();
        match method {
            Auth::OpenToAnyone => {}
            Auth::Bearer(token) => {
                let caller = Caller::of(&key, &[b"caller", token.as_bytes()]);
                self.add_label("token", &digest(token), caller.clone());
                self.tokens.push((Reloading::fixed(vec![digest(token)]), caller));
            }
            Auth::BearerFile { caller, file } => {
                let digests =
                    |tokens: &[Secret]| Ok(tokens.iter().map(|token| digest(token.expose())).collect());
                let tokens = watch_secrets(vec![SecretSource::File(file.clone())], digests)?;
                self.add_label("bearer", caller.as_bytes(), Caller::named(&key, "bearer", caller));
                self.tokens.push((tokens, Caller::named(&key, "bearer", caller)));
            }
            Auth::Hmac { caller, keys } => {
                let keys = keys.iter().map(|key| Secret::new(key.as_str()).into()).collect();
                self.add_label("hmac", caller.as_bytes(), Caller::named(&key, "hmac", caller));
                self.hmac.push((watch_signing_keys(keys)?, Caller::named(&key, "hmac", caller)));
            }
            Auth::HmacFile { caller, file } => {
                let keys = watch_signing_keys(vec![SecretSource::File(file.clone())])?;
                self.add_label("hmac", caller.as_bytes(), Caller::named(&key, "hmac", caller));
                self.hmac.push((keys, Caller::named(&key, "hmac", caller)));
            }
            Auth::Sigv4 { access_key_id, secret_access_key, region, service } => {
                let access_key = AccessKey {
                    id: access_key_id.clone(),
                    secret: Secret::new(secret_access_key.as_str()),
                    session: None,
                    region: region.clone(),
                    service: service.clone(),
                };
                let caller = Caller::named(&key, "sigv4", access_key_id);
                self.add_label("sigv4", access_key_id.as_bytes(), caller.clone());
                self.sigv4.push((access_key, caller));
            }
            Auth::Oauth { server, clients } => {
                for client in clients {
                    self.add_label("oauth", client.as_bytes(), Caller::named(&key, "oauth", client));
                }
                let url = &server.introspection_url;
                if url.scheme() != "https" && !rap_protocol::url::is_on_loopback(url) {
                    return Err(ServeError::AuthorizationServer);
                }
                let introspection = Introspection::new(server.clone())?;
                self.oauth.push((introspection, clients.iter().cloned().collect()));
            }
            Auth::MutualTls { names } => {
                self.add_certificates(names);
                self.certificates = Some(Names(names.iter().cloned().collect()));
            }
            Auth::ProxyHeader { header, proxies, names } => {
                let proxies = TrustedProxies::parse(header, proxies).map_err(ServeError::Proxies)?;
                self.add_certificates(names);
                self.proxies = Some((proxies, Names(names.iter().cloned().collect())));
            }
        }
        Ok(())
    }

    fn add_certificates(&mut self, names: &[String]) {
        for name in names {
            self.add_label("certificate", name.as_bytes(), self.with_certificate(name));
        }
    }

    fn add_label(&mut self, kind: &str, name: &[u8], caller: Caller) {
        self.labels.push(([kind.as_bytes(), b" ", name].concat(), caller));
    }

    /// Returns text by which a server with the same key recognises a caller, without its token. `None` if the caller is
    /// known by neither a fixed token nor a configured name.
    pub(crate) fn label(&self, caller: &Caller, key: &Key) -> Option<String> {
        let (name, _) = self.labels.iter().find(|(_, known)| known == caller)?;
        Some(key.mac(&[b"caller", name]).iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns the caller with this label, or the only caller that there can be.
    pub(crate) fn with_label(&self, label: Option<&str>, key: &Key) -> Option<Caller> {
        let is_it = |caller: &Caller| self.label(caller, key).as_deref() == label;
        let same = label.and_then(|_| self.labels.iter().map(|(_, caller)| caller).find(|one| is_it(one)));
        if same.is_some() {
            return same.cloned();
        }
        let names = self.certificates.iter().chain(self.proxies.iter().map(|(_, names)| names));
        let accepts_any_name = names.into_iter().any(|names| names.0.is_empty());
        let mut all = self.all().into_iter();
        match (all.next(), all.next()) {
            (Some(only), None) if !accepts_any_name => Some(only),
            _ => None,
        }
    }

    fn with_certificate(&self, name: &str) -> Caller {
        Caller::named(&self.key, "certificate", name)
    }

    /// Returns all callers that the server knows.
    pub(crate) fn all(&self) -> HashSet<Caller> {
        if self.is_open() {
            return HashSet::from([Caller::ANONYMOUS]);
        }
        let names = self.certificates.iter().chain(self.proxies.iter().map(|(_, names)| names));
        let named = names.flat_map(|names| &names.0).map(|name| self.with_certificate(name));
        let tokens = self.tokens.iter().map(|(_, caller)| caller);
        let hmac = self.hmac.iter().map(|(_, caller)| caller);
        let sigv4 = self.sigv4.iter().map(|(_, caller)| caller);
        let clients = self.oauth.iter().flat_map(|(_, clients)| clients);
        let clients = clients.map(|client| Caller::named(&self.key, "oauth", client));
        tokens.chain(hmac).chain(sigv4).cloned().chain(named).chain(clients).collect()
    }

    /// Returns true if no authentication is required.
    pub(crate) fn is_open(&self) -> bool {
        let nothing = self.tokens.is_empty() && self.hmac.is_empty() && self.sigv4.is_empty();
        nothing && self.oauth.is_empty() && self.certificates.is_none() && self.proxies.is_none()
    }

    /// Identifies the caller by the head of a request, or returns the reason why the request is refused.
    pub(crate) fn identify(&self, head: &Parts, now: Timestamp) -> Result<CallerInHead, String> {
        if self.is_open() {
            return Ok(CallerInHead::Known(Caller::ANONYMOUS));
        }
        if let Some(caller) = self.by_token(&head.headers).or_else(|| self.by_name(head)) {
            return Ok(CallerInHead::Known(caller));
        }
        if !self.hmac.is_empty() && webhook::is_signed(&head.headers) {
            return webhook::check_time(&head.headers, now)
                .map(|_| CallerInHead::Signed)
                .map_err(|why| why.to_string());
        }
        if !self.sigv4.is_empty() && sigv4::claimed_key(&head.headers).is_some() {
            return Ok(CallerInHead::Signed);
        }
        match bearer(&head.headers) {
            Some(token) if !self.oauth.is_empty() => Ok(CallerInHead::Token(Secret::new(token))),
            _ => Err(self.advice()),
        }
    }

    /// Identifies the caller with an access token.
    pub(crate) async fn introspect(&self, token: &Secret, now: Timestamp) -> Result<Caller, NotAccepted> {
        let mut refused = NotAccepted::Invalid("it is of a client that is not accepted here");
        for (server, clients) in &self.oauth {
            match server.client_of(token.expose(), now).await {
                Ok(client) if clients.contains(&client) => {
                    return Ok(Caller::named(&self.key, "oauth", &client));
                }
                Ok(_) => {}
                // Another server that cannot be asked may know the token.
                Err(why) if matches!(refused, NotAccepted::Invalid(_)) => refused = why,
                Err(_) => {}
            }
        }
        Err(refused)
    }

    /// Says which credentials the server accepts.
    fn advice(&self) -> String {
        let ways = [
            (!self.tokens.is_empty(), "send a token of this server as `Authorization: Bearer TOKEN`"),
            (!self.oauth.is_empty(), "send an access token as `Authorization: Bearer TOKEN`"),
            (!self.hmac.is_empty(), "sign the request in the form of Standard Webhooks"),
            (!self.sigv4.is_empty(), "sign the request with AWS4-HMAC-SHA256"),
            (
                self.certificates.is_some() || self.proxies.is_some(),
                "show a client certificate that this server accepts",
            ),
        ];
        let ways: Vec<&str> =
            ways.into_iter().filter(|(is_accepted, _)| *is_accepted).map(|(_, way)| way).collect();
        ways.join(", or ")
    }

    fn by_token(&self, headers: &HeaderMap) -> Option<Caller> {
        let shown = digest(bearer(headers)?);
        // Compares all tokens, so that the time does not reveal which one matched.
        let mut found = None;
        for (tokens, caller) in &self.tokens {
            for token in tokens.get().iter() {
                if bool::from(token.ct_eq(&shown)) {
                    found = Some(caller.clone());
                }
            }
        }
        found
    }

    /// Returns the caller with the client certificate of the connection, or the one that a trusted proxy names.
    fn by_name(&self, head: &Parts) -> Option<Caller> {
        let peer = head.extensions.get::<Peer>()?;
        // A proxy may have a certificate of its own.
        if let Some((proxies, names)) = &self.proxies
            && let Some(name) = proxies.identity(peer, &head.headers)
        {
            return names.accept(name).then(|| self.with_certificate(name));
        }
        let name = peer.certificate.as_ref()?.names.first()?;
        self.certificates.as_ref()?.accept(name).then(|| self.with_certificate(name))
    }

    /// Checks the signature of a request. `base` is the path of the public URL, and `word` the name of the endpoint in
    /// the ids of a runtime's messages.
    pub(crate) fn verify(
        &self,
        head: &Parts,
        (base, word): (&str, &str),
        body: &[u8],
        now: Timestamp,
    ) -> Result<Signed, String> {
        if webhook::is_signed(&head.headers) && !self.hmac.is_empty() {
            return self.verify_hmac(&head.headers, word, body, now);
        }
        // A proxy, or an application around this server, removes the path of the public URL. The caller has signed it.
        let target = format!("{base}{}", head.uri.path_and_query().map_or("/", |target| target.as_str()));
        let claimed = sigv4::claimed_key(&head.headers).unwrap_or_default();
        let Some((key, caller)) = self.sigv4.iter().find(|(key, _)| key.id == claimed) else {
            return Err("the access key of the request is not known".into());
        };
        let verified = key.verify(head.method.as_str(), &target, &head.headers, body, now);
        verified.map(|()| Signed { caller: caller.clone(), message: None }).map_err(|why| why.to_string())
    }

    fn verify_hmac(
        &self,
        headers: &HeaderMap,
        word: &str,
        body: &[u8],
        now: Timestamp,
    ) -> Result<Signed, String> {
        let mut refused = String::new();
        for (keys, caller) in &self.hmac {
            match keys.get().verify(headers, body, now) {
                Ok(id) => {
                    // The signature does not cover the path, but the ids of `rap` name it.
                    let is_meant = id
                        .strip_prefix("rap_")
                        .is_none_or(|rest| rest.strip_prefix(word).is_some_and(|rest| rest.starts_with('_')));
                    let message = Some(format!("{:x?} {id}", caller.0));
                    return match is_meant {
                        true => Ok(Signed { caller: caller.clone(), message }),
                        false => Err("the request was signed for another path".into()),
                    };
                }
                Err(why) => refused = why.to_string(),
            }
        }
        Err(refused)
    }

    /// Returns true if the same signed message was accepted before.
    pub(crate) fn is_repeated(&self, message: Option<&String>) -> bool {
        message.is_some_and(|message| self.accepted.contains(message))
    }

    /// Remembers a signed message that was accepted.
    pub(crate) fn remember(&self, message: Option<String>, now: Timestamp) {
        if let Some(message) = message {
            self.accepted.insert(message, now);
        }
    }

    /// Returns true if callbacks to the caller are signed.
    pub(crate) fn has_signing_keys(&self, caller: &Caller) -> bool {
        self.hmac.iter().any(|(_, known)| known == caller)
    }

    /// Returns the headers that sign a callback to a caller, if the caller has signing keys.
    pub(crate) fn sign_callback(
        &self,
        caller: &Caller,
        message: i64,
        body: &[u8],
        now: Timestamp,
    ) -> Vec<(HeaderName, HeaderValue)> {
        let Some((keys, _)) = self.hmac.iter().find(|(_, known)| known == caller) else { return Vec::new() };
        // The content of a message that was not sent yet may be replaced; then it is another message.
        let mac = self.key.mac(&[b"callback message", &message.to_be_bytes(), body]);
        let hex: String = mac[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        keys.get().sign(&format!("msg_{hex}"), now, body).into()
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn digest(token: &str) -> TokenDigest {
    Sha256::digest(token.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key::parse(&"ab".repeat(32)).unwrap()
    }

    /// The head of a request with this `Authorization` header.
    fn shown(value: &str) -> Parts {
        let request = axum::http::Request::post("/invoke").header(header::AUTHORIZATION, value);
        request.body(()).unwrap().into_parts().0
    }

    fn caller(callers: &Callers, head: &Parts) -> Option<Caller> {
        match callers.identify(head, Timestamp(0)) {
            Ok(CallerInHead::Known(caller)) => Some(caller),
            _ => None,
        }
    }

    fn tokens(tokens: &[&str]) -> Callers {
        let methods: Vec<Auth> = tokens.iter().map(|token| Auth::Bearer((*token).into())).collect();
        Callers::new(&methods, &key()).unwrap()
    }

    /// Proves: TR-19, TC-18, CN-20
    #[test]
    fn each_token_is_a_separate_caller() {
        let callers = tokens(&["one", "two"]);
        let one = caller(&callers, &shown("Bearer one")).unwrap();
        let two = caller(&callers, &shown("bearer two")).unwrap();
        assert!(one != two);
        for wrong in ["Bearer three", "Bearer ", "Bearer", "Basic one", "one", "Bearer one two"] {
            assert!(caller(&callers, &shown(wrong)).is_none(), "{wrong}");
        }
        assert!(caller(&callers, &axum::http::Request::new(()).into_parts().0).is_none());
    }

    #[test]
    fn without_tokens_everyone_is_the_same_caller() {
        let callers = tokens(&[]);
        assert!(callers.is_open());
        assert!(caller(&callers, &shown("Bearer any")) == Some(Caller::ANONYMOUS));
    }

    /// The journal of an earlier release identifies callers by this hash.
    #[test]
    fn the_identity_of_a_bearer_token_is_stable() {
        let one = caller(&tokens(&["one"]), &shown("Bearer one")).unwrap();
        assert_eq!(one, Caller::of(&key(), &[b"caller", b"one"]));
    }

    #[test]
    fn methods_contain_no_secret_in_their_debug_output() {
        let hmac = Auth::Hmac { caller: "runtime".into(), keys: vec!["whsec_s3cret".into()] };
        for method in [Auth::Bearer("s3cret".into()), hmac] {
            assert!(!format!("{method:?}").contains("s3cret"));
        }
    }
}
