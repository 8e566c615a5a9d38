//! Toolsets of the tool servers, fetched only through discovery.
//!
//! A session keeps the toolsets that were fetched for its first question, identified by content hash, and uses them
//! also while a server is down. A new session fetches them again; if a server does not answer, it gets the newest
//! toolset that any session has fetched. A toolset is valid as a whole or not at all. A tool name that two servers use
//! is not offered, nor is the name of a built-in tool.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use http::{HeaderName, HeaderValue, header};
use rap_agent::{Cause, texts};
use rap_protocol::{DISCOVERY_PATH, Timestamp, Tool, Toolset, UrlRules, parse_toolset};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use url::Url;

use crate::display::Scripts;
use crate::function::IN_PROCESS;
use crate::model::OfferedTool;
use crate::settings::ToolServer;
use crate::store::{Error, SessionKey, SessionToolset, Store, StoredToolset};
use crate::world::World;

/// Shortest time between two fetches for a session from a server that failed, and between two refreshes after a 409.
/// The first fetch is not a refresh.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of cached sessions, and of cached toolsets.
const CACHED: usize = 512;
/// Maximum total size of the documents of cached toolsets, in bytes. A server may send a different one to each session.
const CACHED_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of remembered refreshes. Beyond it, a refresh has to wait.
const MAX_REFRESHES: usize = 65_536;
/// Maximum size of a toolset, in bytes.
const TOOLSET_BYTES: usize = rap_protocol::limits::BODY_BYTES;

pub(crate) struct Toolsets {
    /// The tool servers, and [`IN_PROCESS`] if there are functions.
    servers: Vec<ToolServer>,
    /// Toolset of the functions of this process.
    functions: Option<Vec<u8>>,
    /// Rules for endpoints.
    urls: Arc<UrlRules>,
    world: World,
    timeout: Duration,
    cache: Mutex<Cache>,
    /// Locks by server: sessions that refresh at the same time share one fetch.
    refreshing: HashMap<String, tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct Cache {
    sessions: HashMap<SessionKey, Arc<SessionTools>>,
    parsed: HashMap<String, Parsed>,
    /// Total size of their documents.
    parsed_bytes: usize,
    /// Last outcome of discovery, by server.
    latest: HashMap<String, Fetched>,
    /// Last valid toolset, by server.
    newest: HashMap<String, Document>,
    /// Time at which a session last refreshed the toolset of a server.
    refreshed: HashMap<(SessionKey, String), Instant>,
}

/// A toolset as the server sent it.
#[derive(Clone)]
struct Document {
    hash: String,
    body: Arc<Vec<u8>>,
}

/// Outcome of discovery.
#[derive(Clone)]
enum Fetched {
    Toolset(Document),
    Failed(String),
}

impl Fetched {
    /// Converts the outcome to the toolset of a session.
    fn for_session(&self, session: SessionKey, server: &str, fetched_at: Timestamp) -> SessionToolset {
        let (toolset, error) = match self {
            Fetched::Toolset(Document { hash, body }) => {
                (Some(StoredToolset { hash: hash.clone(), body: Some(Arc::clone(body)) }), None)
            }
            Fetched::Failed(why) => (None, Some(why.clone())),
        };
        SessionToolset { session, server: server.to_owned(), toolset, error, fetched_at }
    }
}

/// Result of a refresh after a tool server answered 409.
pub(crate) enum Refresh {
    /// The session has to store this toolset.
    Take(SessionToolset),
    /// There is nothing to refresh, because the server is not configured or not part of the session.
    NotNeeded,
    /// The session may refresh only after this time.
    Wait(Duration),
}

/// Name of the agent, cause of its thread, and whether the thread has a parent. The offered tools depend on these.
type OfferKey = (String, Cause, bool);

/// The tools of a session.
pub(crate) struct SessionTools {
    pub(crate) servers: Vec<ServerTools>,
    /// Index of the server and of the tool in its toolset, by name of the tool.
    offered: HashMap<String, (usize, usize)>,
    /// Cache of the tools that are offered to each agent's model.
    offers: Mutex<HashMap<OfferKey, Arc<[OfferedTool]>>>,
}

/// A parsed toolset with its compiled display scripts.
#[derive(Clone)]
struct Parsed {
    toolset: Arc<Toolset>,
    scripts: Arc<Scripts>,
}

/// Tools of one server in a session.
pub(crate) struct ServerTools {
    pub(crate) url: String,
    /// Hash of the toolset.
    hash: Option<String>,
    pub(crate) toolset: Option<Arc<Toolset>>,
    pub(crate) scripts: Option<Arc<Scripts>>,
    pub(crate) errors: Vec<String>,
    pub(crate) fetched_at: Timestamp,
}

impl SessionTools {
    /// Finds an offered tool, with its server and toolset.
    pub(crate) fn find(&self, name: &str) -> Option<(&ServerTools, &Toolset, &Tool)> {
        let (server, tool) = *self.offered.get(name)?;
        let server = &self.servers[server];
        let toolset = server.toolset.as_deref()?;
        Some((server, toolset, &toolset.tools[tool]))
    }

    /// Returns all offered tools, in the order of servers and toolsets.
    pub(crate) fn offered(&self) -> impl Iterator<Item = &Tool> {
        self.servers
            .iter()
            .filter_map(|server| server.toolset.as_deref())
            .flat_map(|toolset| &toolset.tools)
            .filter(|tool| self.offered.contains_key(tool.name.as_str()))
    }

    /// Returns the tools that are offered for a key. `make` computes them once.
    pub(crate) fn cached_offer(
        &self,
        key: OfferKey,
        make: impl FnOnce() -> Arc<[OfferedTool]>,
    ) -> Arc<[OfferedTool]> {
        let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(offers.entry(key).or_insert_with(make))
    }

    pub(crate) fn server(&self, url: &str) -> Option<&ServerTools> {
        self.servers.iter().find(|server| server.url == url)
    }

    fn assemble(mut servers: Vec<ServerTools>) -> SessionTools {
        let mut candidates: HashMap<String, Vec<(usize, usize)>> = HashMap::new();
        for (at, server) in servers.iter().enumerate() {
            let tools = server.toolset.iter().flat_map(|toolset| toolset.tools.iter().enumerate());
            for (place, tool) in tools {
                candidates.entry(tool.name.as_str().to_owned()).or_default().push((at, place));
            }
        }
        let mut offered = HashMap::new();
        let mut conflicts: Vec<(String, Vec<(usize, usize)>)> = Vec::new();
        for (name, places) in candidates {
            if places.len() == 1 && !texts::BUILT_IN.contains(&name.as_str()) {
                offered.insert(name, places[0]);
            } else {
                conflicts.push((name, places));
            }
        }
        conflicts.sort();
        for (name, places) in conflicts {
            for (at, _) in &places {
                let why = if texts::BUILT_IN.contains(&name.as_str()) {
                    format!("{name}: not offered; it is the name of a built-in tool")
                } else {
                    let others = places.iter().filter(|(other, _)| other != at);
                    let others: Vec<String> = others.map(|(other, _)| servers[*other].url.clone()).collect();
                    format!("{name}: not offered; {} has a tool of the same name", others.join(" and "))
                };
                servers[*at].errors.push(why);
            }
        }
        SessionTools { servers, offered, offers: Mutex::default() }
    }
}

impl Toolsets {
    pub(crate) fn new(
        mut servers: Vec<ToolServer>,
        functions: Option<Vec<u8>>,
        urls: Arc<UrlRules>,
        world: World,
        timeout: Duration,
    ) -> Toolsets {
        if functions.is_some() {
            servers.push(ToolServer { url: IN_PROCESS.into(), bearer: None });
        }
        let refreshing = servers.iter().map(|server| (server.url.clone(), Default::default())).collect();
        Toolsets { servers, functions, urls, world, timeout, cache: Mutex::default(), refreshing }
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tools of a session. Fetches missing toolsets concurrently. Also returns notices about servers that
    /// failed.
    pub(crate) async fn discover(
        &self,
        store: &dyn Store,
        session: SessionKey,
    ) -> Result<(Arc<SessionTools>, Vec<String>), Error> {
        let at = self.world.now();
        let cached = self.cache().sessions.get(&session).cloned();
        if let Some(tools) = cached.filter(|tools| !tools.needs_discovery(at)) {
            return Ok((tools, Vec::new()));
        }
        let mut stored = store.session_toolsets(session).await?;
        let wanted = |server: &&ToolServer| match stored.iter().find(|stored| stored.server == server.url) {
            None => true,
            Some(stored) => stored.toolset.is_none() && may_retry(stored.fetched_at, at),
        };
        let wanted: Vec<&ToolServer> = self.servers.iter().filter(wanted).collect();
        let fetched = join_all(wanted.iter().map(|server| self.fetch(server))).await;
        let (mut fresh, mut notices) = (Vec::new(), Vec::new());
        for (server, fetched) in wanted.into_iter().zip(fetched) {
            let before = stored.iter().find(|stored| stored.server == server.url);
            let mut now = fetched.for_session(session, &server.url, at);
            if now.toolset.is_none() {
                now.toolset = self.newest(store, &server.url).await?;
            }
            notices.extend(failure_notice(before, &now));
            fresh.push(now);
        }
        stored.retain(|stored| fresh.iter().all(|fresh| fresh.server != stored.server));
        stored.extend(fresh.iter().cloned());
        let tools = self.assemble(store, &stored).await?;
        if !fresh.is_empty() {
            store.save_toolsets(fresh).await?;
        }
        self.cache_session(session, Arc::clone(&tools));
        Ok((tools, notices))
    }

    /// Returns the newest toolset of a server that any session has fetched.
    async fn newest(&self, store: &dyn Store, server: &str) -> Result<Option<StoredToolset>, Error> {
        let known = self.cache().newest.get(server).cloned();
        if let Some(Document { hash, body }) = known {
            return Ok(Some(StoredToolset { hash, body: Some(body) }));
        }
        Ok(store.newest_toolset(server).await?.map(|hash| StoredToolset { hash, body: None }))
    }

    /// Returns the tools of a session without discovery, so that an invocation waits for no server but its own.
    pub(crate) async fn load(
        &self,
        store: &dyn Store,
        session: SessionKey,
    ) -> Result<Arc<SessionTools>, Error> {
        let cached = self.cache().sessions.get(&session).cloned();
        if let Some(tools) = cached {
            return Ok(tools);
        }
        let tools = self.assemble(store, &store.session_toolsets(session).await?).await?;
        self.cache_session(session, Arc::clone(&tools));
        Ok(tools)
    }

    fn cache_session(&self, session: SessionKey, tools: Arc<SessionTools>) {
        let mut cache = self.cache();
        if cache.sessions.len() >= CACHED {
            cache.sessions.clear();
        }
        cache.sessions.insert(session, tools);
    }

    async fn assemble(
        &self,
        store: &dyn Store,
        stored: &[SessionToolset],
    ) -> Result<Arc<SessionTools>, Error> {
        let mut servers = Vec::with_capacity(self.servers.len());
        for server in &self.servers {
            let stored = stored.iter().find(|stored| stored.server == server.url);
            let error = stored.and_then(|stored| stored.error.clone());
            let (parsed, error) = match stored.and_then(|stored| stored.toolset.as_ref()) {
                None => (None, error),
                Some(toolset) => self.parsed(store, toolset, error).await?,
            };
            let endpoint = parsed
                .as_ref()
                .and_then(|parsed| self.endpoint_problem(server, &parsed.toolset.endpoint.to_url()));
            servers.push(ServerTools {
                url: server.url.clone(),
                hash: stored.and_then(|stored| stored.toolset.as_ref()).map(|toolset| toolset.hash.clone()),
                toolset: parsed.as_ref().map(|parsed| Arc::clone(&parsed.toolset)),
                scripts: parsed.map(|parsed| parsed.scripts),
                errors: error.into_iter().chain(endpoint).collect(),
                fetched_at: stored.map_or(Timestamp(0), |stored| stored.fetched_at),
            });
        }
        Ok(Arc::new(SessionTools::assemble(servers)))
    }

    /// Returns what is wrong with the endpoint that a server names, as far as its URL tells.
    fn endpoint_problem(&self, server: &ToolServer, endpoint: &Url) -> Option<String> {
        let base = Url::parse(&server.url).ok()?;
        if let Err(forbidden) = self.urls.check_named_by(&base, endpoint) {
            return Some(format!("calls are refused, because the endpoint is not allowed: {forbidden}"));
        }
        let withheld = server.bearer.is_some() && !may_have_credentials(&self.urls, server, endpoint);
        withheld.then(|| {
            "calls are sent without the token, because the endpoint is not on this server; add its host and port to \
             server.allow_hosts to send it there"
                .into()
        })
    }

    /// Parses a stored or fetched toolset. Its schemas and scripts are compiled once and cached.
    async fn parsed(
        &self,
        store: &dyn Store,
        toolset: &StoredToolset,
        error: Option<String>,
    ) -> Result<(Option<Parsed>, Option<String>), Error> {
        let hash = toolset.hash.clone();
        if let Some(parsed) = self.cache().parsed.get(&hash) {
            return Ok((Some(parsed.clone()), error));
        }
        let body = match &toolset.body {
            Some(body) => Arc::clone(body),
            None => Arc::new(store.toolset(&hash).await?.unwrap_or_default()),
        };
        let bytes = body.len();
        let parse = move || {
            parse_toolset(&body).map(|toolset| Parsed {
                scripts: Arc::new(Scripts::of(&toolset)),
                toolset: Arc::new(toolset),
            })
        };
        match self.world.blocking.run(parse).await {
            Some(Ok(parsed)) => {
                let mut cache = self.cache();
                if cache.parsed.len() >= CACHED || cache.parsed_bytes + bytes > CACHED_BYTES {
                    // Cached sessions also keep their toolsets in memory.
                    cache.parsed.clear();
                    cache.sessions.clear();
                    cache.parsed_bytes = 0;
                }
                if cache.parsed.insert(hash, parsed.clone()).is_none() {
                    cache.parsed_bytes += bytes;
                }
                Ok((Some(parsed), error))
            }
            Some(Err(invalid)) => Ok((None, Some(format!("the toolset is not valid: {invalid}")))),
            None => Ok((None, Some("the toolset could not be read".into()))),
        }
    }

    async fn fetch(&self, server: &ToolServer) -> Fetched {
        let fetched = tokio::time::timeout(self.timeout, self.fetch_now(server)).await;
        let fetched = match fetched {
            Ok(Ok((hash, body))) => Fetched::Toolset(Document { hash, body: Arc::new(body) }),
            Ok(Err(why)) => Fetched::Failed(why),
            Err(_) => Fetched::Failed(format!("discovery took longer than {:?}", self.timeout)),
        };
        let mut cache = self.cache();
        match &fetched {
            Fetched::Failed(why) => tracing::warn!(server = server.url, why, "discovery failed"),
            Fetched::Toolset(document) => drop(cache.newest.insert(server.url.clone(), document.clone())),
        }
        cache.latest.insert(server.url.clone(), fetched.clone());
        fetched
    }

    async fn fetch_now(&self, server: &ToolServer) -> Result<(String, Vec<u8>), String> {
        let body = match &self.functions {
            Some(toolset) if server.url == IN_PROCESS => toolset.clone(),
            _ => self.fetch_valid(server).await?,
        };
        let digest = Sha256::digest(&body);
        Ok((digest.iter().map(|byte| format!("{byte:02x}")).collect(), body))
    }

    /// Fetches the toolset of a server. It is valid as a whole, or it is discarded.
    async fn fetch_valid(&self, server: &ToolServer) -> Result<Vec<u8>, String> {
        let url =
            Url::parse(&format!("{}{DISCOVERY_PATH}", server.url)).map_err(|error| error.to_string())?;
        let answer = self.world.http.get(&url, &authorization(server), TOOLSET_BYTES).await;
        let answer = answer.map_err(|error| format!("discovery failed: {error}"))?;
        if answer.status != 200 {
            return Err(format!("discovery was answered {}", answer.status));
        }
        let body = answer.body.to_vec();
        let checked = self.world.blocking.run(move || parse_toolset(&body).map(|_| body)).await;
        checked
            .ok_or_else(|| "the toolset could not be read".to_owned())?
            .map_err(|invalid| format!("the toolset is not valid: {invalid}"))
    }

    /// Handles a 409: returns the newest known toolset of the server. If the session has it already, fetches it again,
    /// at most once a minute per session.
    pub(crate) async fn refresh(&self, session: SessionKey, current: &ServerTools) -> Refresh {
        let (Some(server), Some(lock)) =
            (self.servers.iter().find(|server| server.url == current.url), self.refreshing.get(&current.url))
        else {
            return Refresh::NotNeeded;
        };
        // A session that waits here gets the toolset that another session has fetched meanwhile.
        let _guard = lock.lock().await;
        let newest = self.cache().newest.get(&current.url).cloned();
        let fetched = match newest {
            Some(document) if current.hash.as_ref() != Some(&document.hash) => Fetched::Toolset(document),
            _ => {
                if let Some(pause) = self.refresh_delay(session, &current.url) {
                    return Refresh::Wait(pause);
                }
                self.fetch(server).await
            }
        };
        self.cache().sessions.remove(&session);
        Refresh::Take(fetched.for_session(session, &current.url, self.world.now()))
    }

    /// Returns the time until the session may refresh. `None` allows a refresh now and records it.
    fn refresh_delay(&self, session: SessionKey, server: &str) -> Option<Duration> {
        let now = Instant::now();
        let mut cache = self.cache();
        cache.refreshed.retain(|_, at| *at + RETRY_AFTER > now);
        let key = (session, server.to_owned());
        if let Some(last) = cache.refreshed.get(&key) {
            return Some((*last + RETRY_AFTER).saturating_duration_since(now));
        }
        if cache.refreshed.len() >= MAX_REFRESHES {
            return Some(RETRY_AFTER);
        }
        cache.refreshed.insert(key, now);
        None
    }

    /// Returns the tools of the last discovery of each server. Servers that were never asked are asked now.
    pub(crate) async fn latest(&self, store: &dyn Store) -> Result<Arc<SessionTools>, Error> {
        let known: Vec<String> = self.cache().latest.keys().cloned().collect();
        let unknown = self.servers.iter().filter(|server| !known.contains(&server.url));
        join_all(unknown.map(|server| self.fetch(server))).await;
        let (at, latest) = (self.world.now(), self.cache().latest.clone());
        let stored: Vec<SessionToolset> = latest
            .iter()
            .map(|(server, fetched)| fetched.for_session(SessionKey::NONE, server, at))
            .collect();
        self.assemble(store, &stored).await
    }
}

impl SessionTools {
    /// Returns true if a server that failed should be asked again.
    fn needs_discovery(&self, now: Timestamp) -> bool {
        self.servers.iter().any(|server| server.toolset.is_none() && may_retry(server.fetched_at, now))
    }
}

/// Returns true if the pause after a fetch is over. A clock that was set back does not extend it.
fn may_retry(fetched_at: Timestamp, now: Timestamp) -> bool {
    fetched_at > now || fetched_at.plus(RETRY_AFTER) <= now
}

/// Returns a notice about a server that failed, unless the session has had the same one before.
fn failure_notice(before: Option<&SessionToolset>, now: &SessionToolset) -> Option<String> {
    let why = now.error.as_ref()?;
    let known = before.is_some_and(|before| before.error.as_ref() == Some(why));
    let notice = match now.toolset {
        None => format!("the tools of {} are not available: {why}", now.server),
        Some(_) => {
            format!("the tools of {} could not be fetched: {why}; the last known ones are used", now.server)
        }
    };
    (!known).then_some(notice)
}

/// Returns true if the credentials for a tool server may be sent to this URL.
pub(crate) fn may_have_credentials(urls: &UrlRules, server: &ToolServer, url: &Url) -> bool {
    Url::parse(&server.url).is_ok_and(|base| urls.may_have_credentials(&base, url))
}

/// Returns the `Authorization` header for a tool server, if it has a bearer token.
pub(crate) fn authorization(server: &ToolServer) -> Vec<(HeaderName, HeaderValue)> {
    let Some(bearer) = &server.bearer else { return Vec::new() };
    match HeaderValue::try_from(format!("Bearer {}", bearer.expose())) {
        Ok(mut value) => {
            value.set_sensitive(true);
            vec![(header::AUTHORIZATION, value)]
        }
        Err(_) => {
            tracing::error!(server = server.url, "the bearer token cannot be sent in a header");
            Vec::new()
        }
    }
}
