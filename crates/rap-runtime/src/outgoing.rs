//! HTTP requests to tool servers, with the credentials of each server.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits, Error, Fetched, Reply};
use rap_io::credentials::{Credentials, Signer, Unsigned};
use rap_io::hashing::hash;
use rap_io::reloading::{FileError, Reloading};
use rap_protocol::{TRACEPARENT, Timestamp, UrlRules};
use sha2::{Digest, Sha256};
use url::Url;

use crate::settings::{AlertDestination, SettingsError, ToolServer};
use crate::world::{Http, HttpLimits, MessageKind, To};

/// Time limit for a tool server to move the state of a session.
const MIGRATE_TIMEOUT: Duration = Duration::from_secs(300);
/// Status of an answer to a request without valid credentials.
const UNAUTHORIZED: u16 = 401;

pub(crate) struct RealHttp {
    /// Clients for servers without TLS settings of their own.
    common: Clients,
    servers: HashMap<String, Access>,
}

/// Access to a tool server.
struct Access {
    signer: Signer,
    /// Clients with the TLS settings of the server.
    clients: Option<Clients>,
}

/// Clients by time limit, each with its own connections.
struct Clients {
    invoke: Reloading<Client>,
    notify: Reloading<Client>,
    discover: Reloading<Client>,
    migrate: Reloading<Client>,
}

impl Clients {
    fn new<E>(
        limits: HttpLimits,
        client: impl Fn(ClientLimits) -> Result<Reloading<Client>, E>,
    ) -> Result<Clients, E> {
        let within = |total: Duration| client(ClientLimits { total, ..ClientLimits::default() });
        Ok(Clients {
            invoke: within(limits.invoke)?,
            notify: within(limits.notify)?,
            discover: within(limits.discover)?,
            migrate: within(MIGRATE_TIMEOUT)?,
        })
    }
}

impl MessageKind {
    /// Word in the ids of signed messages. Receivers compare it with the path, because a signature does not cover that.
    fn word(self) -> &'static str {
        match self {
            MessageKind::Invocation => "invoke",
            MessageKind::Answer => "answer",
            MessageKind::Close => "close",
            MessageKind::Cancel => "cancel",
            MessageKind::StatusQuery => "status",
            MessageKind::Migrate => "migrate",
            MessageKind::Alert => "alert",
        }
    }

    /// Returns the id of a message. It is the same in every attempt, except for status queries and migrations, which may be
    /// repeated.
    fn id(self, url: &Url, body: &[u8], now: Timestamp) -> String {
        let mut digest = Sha256::new_with_prefix(url.as_str());
        digest.update([0]);
        digest.update(body);
        if matches!(self, MessageKind::StatusQuery | MessageKind::Migrate) {
            digest.update(now.0.to_be_bytes());
        }
        let hex: String = digest.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("rap_{}_{hex}", self.word())
    }
}

impl RealHttp {
    pub(crate) fn new(
        rules: &UrlRules,
        limits: HttpLimits,
        servers: &[ToolServer],
        notify: &[AlertDestination],
    ) -> Result<RealHttp, SettingsError> {
        let common =
            |limits| Ok::<_, SettingsError>(Reloading::fixed(Client::outgoing(rules.clone(), limits)));
        let mut access = HashMap::new();
        for server in servers {
            let failed = |error: rap_io::reloading::FileError| SettingsError::Credentials {
                server: server.url.clone(),
                why: error.to_string(),
            };
            let signer = Signer::new(&server.credentials).map_err(failed)?;
            let tls = server.credentials.tls.as_ref();
            let clients = tls.map(|tls| Clients::new(limits, |limits| tls.outgoing(rules.clone(), limits)));
            let clients = clients.transpose().map_err(failed)?;
            access.insert(server.url.clone(), Access { signer, clients });
        }
        for destination in notify {
            let credentials = Credentials { hmac: destination.keys.clone(), ..Credentials::default() };
            let failed = |error: FileError| SettingsError::Notify {
                server: destination.origin(),
                why: error.to_string(),
            };
            let signer = Signer::new(&credentials).map_err(failed)?;
            access.insert(destination.key(), Access { signer, clients: None });
        }
        Ok(RealHttp { common: Clients::new(limits, common)?, servers: access })
    }

    fn access(&self, to: To<'_>) -> (Option<&Access>, &Clients) {
        let access = to.credentials_of.and_then(|server| self.servers.get(server));
        (access, access.and_then(|access| access.clients.as_ref()).unwrap_or(&self.common))
    }
}

type Headers = Vec<(HeaderName, HeaderValue)>;

async fn headers(access: Option<&Access>, request: Unsigned<'_>, now: Timestamp) -> Result<Headers, Error> {
    match access {
        Some(access) => access.signer.headers(request, now).await,
        None => Ok(Vec::new()),
    }
}

/// Returns the headers of a request with its trace context. No signature covers it.
fn with_trace<'a>(shown: &'a Headers, to: To<'_>) -> Cow<'a, Headers> {
    let Some(trace) = to.trace else { return Cow::Borrowed(shown) };
    let value = HeaderValue::from_str(&trace.to_string()).expect("bug: the context is ASCII text");
    let mut headers = shown.clone();
    headers.push((HeaderName::from_static(TRACEPARENT), value));
    Cow::Owned(headers)
}

#[async_trait]
impl Http for RealHttp {
    async fn post(&self, kind: MessageKind, to: To<'_>, body: Bytes) -> Result<Reply, Error> {
        let (access, clients) = self.access(to);
        let client: Arc<Client> = match kind {
            MessageKind::Invocation | MessageKind::Answer => clients.invoke.get(),
            MessageKind::Close | MessageKind::Cancel | MessageKind::StatusQuery | MessageKind::Alert => {
                clients.notify.get()
            }
            MessageKind::Migrate => clients.migrate.get(),
        };
        let now = Timestamp::from(SystemTime::now());
        let id = match access.filter(|access| access.signer.signs_messages()) {
            None => None,
            Some(_) => {
                let (url, body) = (to.url.clone(), body.clone());
                Some(hash(body.len(), move || kind.id(&url, &body, now)).await)
            }
        };
        let request = Unsigned { method: "POST", url: to.url, id: id.as_deref(), body: &body };
        let shown = headers(access, request, now).await?;
        let reply = client.post_json(to.url, &with_trace(&shown, to), body.clone()).await?;
        let Some(access) = access.filter(|_| reply.status == UNAUTHORIZED) else { return Ok(reply) };
        if !access.signer.renew(&shown).await {
            return Ok(reply);
        }
        let shown = headers(Some(access), request, now).await?;
        client.post_json(to.url, &with_trace(&shown, to), body.clone()).await
    }

    async fn get(&self, to: To<'_>, max_bytes: usize) -> Result<Fetched, Error> {
        let (access, clients) = self.access(to);
        let client = clients.discover.get();
        let now = Timestamp::from(SystemTime::now());
        let nothing = Bytes::new();
        let request = Unsigned { method: "GET", url: to.url, id: None, body: &nothing };
        let shown = headers(access, request, now).await?;
        let fetched = client.get(to.url, &shown, max_bytes).await?;
        let Some(access) = access.filter(|_| fetched.status == UNAUTHORIZED) else { return Ok(fetched) };
        if !access.signer.renew(&shown).await {
            return Ok(fetched);
        }
        let shown = headers(Some(access), request, now).await?;
        client.get(to.url, &shown, max_bytes).await
    }
}
