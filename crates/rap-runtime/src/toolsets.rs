//! Toolsets of the tool servers, fetched only through discovery.
//!
//! A session keeps the toolsets that were fetched for it, identified by content hash, and uses them even while a server
//! is down. A new session fetches them again; if a server does not answer, it gets the newest toolset that any session
//! has fetched. A toolset is valid as a whole or not at all.

mod discovery;
mod health;
mod parsed;
mod session;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rap_io::client;
use rap_io::hashing::in_place;
use rap_protocol::limits::BODY_BYTES;
use rap_protocol::{DISCOVERY_PATH, ExpectedDuration, Timestamp, Toolset, UrlRules, parse_toolset, visible};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use url::Url;

use crate::function::IN_PROCESS;
use crate::memory::{Grant, Memory, NoMemory};
use crate::settings::ToolServer;
use crate::store::{Error, SessionKey, SessionToolset, Source, Store, StoredToolset};
use crate::world::{To, World};
pub(crate) use discovery::AwaitedFetches;
use discovery::Fetches;
use health::Outcomes;
use parsed::{FREE_BYTES, PARSERS, ParseOutcome, Parsed, ToolsetMemory};
pub(crate) use session::{ServerTools, SessionTools};

/// Shortest time between two fetches for a session from a server that failed, and between two refreshes after a 409.
/// The first fetch is not a refresh.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of cached sessions, and of cached toolsets.
const CACHED: usize = 512;
/// Reason why a toolset is not used.
pub(crate) const NO_MEMORY: &str =
    "the large toolsets in use need more memory than limits.toolset_bytes allows";
/// Maximum number of remembered refreshes. Beyond it, a refresh has to wait.
const MAX_REFRESHES: usize = 65_536;
/// Maximum number of characters of the reason that a server gives for an error.
const REASON_CHARS: usize = 500;
/// Maximum size of a toolset, in bytes.
const TOOLSET_BYTES: usize = BODY_BYTES;

pub(crate) struct Toolsets {
    /// The tool servers, and [`IN_PROCESS`] if there are functions.
    servers: Vec<ToolServer>,
    /// Toolset of the functions of this process.
    functions: Option<Vec<u8>>,
    /// Rules for endpoints.
    urls: Arc<UrlRules>,
    world: World,
    store: Arc<dyn Store>,
    limits: DiscoveryLimits,
    cache: Mutex<Cache>,
    /// Memory of large toolsets. Users are the tool servers.
    memory: Memory<String>,
    parsers: Semaphore,
    fetches: Fetches,
    outcomes: Outcomes,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Limits of discovery.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiscoveryLimits {
    /// Time for a whole fetch.
    pub(crate) timeout: Duration,
    /// Time that a model request waits for a fetch, counted from the start of the fetch.
    pub(crate) wait: Duration,
    /// Memory of large toolsets.
    pub(crate) bytes: usize,
}

#[derive(Default)]
struct Cache {
    sessions: HashMap<SessionKey, Arc<SessionTools>>,
    /// Number of times that a session was forgotten. What was read from the store before the last time may be outdated,
    /// and is not cached.
    forgotten: u64,
    /// Sessions for which another toolset is about to be stored, and how many. They are not cached.
    changing: HashMap<SessionKey, usize>,
    parsed: HashMap<String, Parsed>,
    /// Memory of those that need no memory of the common one.
    parsed_bytes: usize,
    /// Last outcome of discovery, by server.
    latest: HashMap<String, Fetched>,
    /// Last valid toolset, by server.
    newest: HashMap<String, Document>,
    /// Time at which a session last refreshed the toolset of a server.
    refreshed: HashMap<(SessionKey, String), Instant>,
    /// Value of [`Fleet::alone_since`] for which this was cached.
    alone_since: Option<u64>,
}

impl Cache {
    /// Drops all parsed toolsets. Cached sessions also keep theirs in memory.
    fn drop_parsed(&mut self) {
        self.parsed.clear();
        self.sessions.clear();
        self.parsed_bytes = 0;
    }
}

/// A toolset as the server sent it.
#[derive(Clone)]
struct Document {
    hash: String,
    body: Arc<Vec<u8>>,
    _memory: ToolsetMemory,
}

impl Document {
    fn to_stored(&self) -> StoredToolset {
        StoredToolset { hash: self.hash.clone(), body: Some(Arc::clone(&self.body)) }
    }
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
            Fetched::Toolset(Document { hash, body, .. }) => {
                (Some(StoredToolset { hash: hash.clone(), body: Some(Arc::clone(body)) }), None)
            }
            Fetched::Failed(why) => (None, Some(why.clone())),
        };
        SessionToolset {
            session,
            server: server.to_owned(),
            toolset,
            error,
            fetched_at,
            source: Source::Fetched,
        }
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

/// Usual durations of calls, as the newest toolset of each server states them.
#[derive(Default)]
pub(crate) struct UsualDurations {
    toolsets: HashMap<String, Arc<Toolset>>,
}

impl UsualDurations {
    /// Returns the usual duration of calls of a tool, if its server states it.
    pub(crate) fn of(&self, server: &str, tool: &str) -> Option<ExpectedDuration> {
        let tools = &self.toolsets.get(server)?.tools;
        tools.iter().find(|offered| offered.name.as_str() == tool)?.annotations.expected_duration()
    }
}

impl Toolsets {
    pub(crate) fn new(
        mut servers: Vec<ToolServer>,
        functions: Option<Vec<u8>>,
        urls: Arc<UrlRules>,
        world: World,
        store: Arc<dyn Store>,
        limits: DiscoveryLimits,
        (tasks, stop): (TaskTracker, CancellationToken),
    ) -> Arc<Toolsets> {
        if functions.is_some() {
            servers.push(ToolServer::new(IN_PROCESS));
        }
        Arc::new(Toolsets {
            servers,
            functions,
            urls,
            world,
            store,
            limits,
            cache: Mutex::default(),
            memory: Memory::new(limits.bytes, limits.bytes.div_ceil(2)),
            parsers: Semaphore::new(PARSERS),
            fetches: Fetches::default(),
            outcomes: Outcomes::default(),
            tasks,
            stop,
        })
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if another node may change toolsets of sessions, so that what is cached has to be compared with the
    /// store. When the last other node is gone, nothing is cached. Called before the cache is read.
    fn is_shared(&self) -> bool {
        let Some(fleet) = self.store.fleet() else { return false };
        let alone_since = fleet.alone_since();
        let mut cache = self.cache();
        if std::mem::replace(&mut cache.alone_since, alone_since) != alone_since {
            cache.forgotten += 1;
            cache.sessions.clear();
            cache.newest.clear();
        }
        alone_since.is_none()
    }

    /// Returns the newest toolset of a server that any session has fetched.
    async fn newest(&self, server: &str) -> Result<Option<StoredToolset>, Error> {
        if !self.is_shared()
            && let Some(document) = self.cache().newest.get(server).cloned()
        {
            return Ok(Some(document.to_stored()));
        }
        Ok(self.store.newest_toolset(server).await?.map(|hash| StoredToolset { hash, body: None }))
    }

    /// Returns the usual durations of calls to these servers. Waits for no server.
    pub(crate) async fn usual_durations(&self, servers: HashSet<&str>) -> Result<UsualDurations, Error> {
        let mut known = UsualDurations::default();
        for server in self.servers.iter().filter(|server| servers.contains(server.url.as_str())) {
            if let Some(newest) = self.newest(&server.url).await?
                && let ParseOutcome::Parsed(parsed) = self.parsed(&server.url, &newest).await?
            {
                known.toolsets.insert(server.url.clone(), parsed.toolset);
            }
        }
        Ok(known)
    }

    /// Returns the tools of a session without discovery, so that an invocation waits for no server but its own.
    pub(crate) async fn load(&self, session: SessionKey) -> Result<Arc<SessionTools>, Error> {
        if !self.is_shared()
            && let Some(tools) = self.cache().sessions.get(&session).cloned()
        {
            return Ok(tools);
        }
        let forgotten = self.cache().forgotten;
        let stored = self.store.session_toolsets(session).await?;
        self.of_session(session, &stored, forgotten).await
    }

    /// Returns the tools of a session from its stored toolsets. `forgotten` is the value before they were read.
    async fn of_session(
        &self,
        session: SessionKey,
        stored: &[SessionToolset],
        forgotten: u64,
    ) -> Result<Arc<SessionTools>, Error> {
        let cached = self.cache().sessions.get(&session).cloned();
        if let Some(tools) = cached.filter(|tools| tools.is_current(stored)) {
            return Ok(tools);
        }
        let tools = self.assemble(stored).await?;
        let mut cache = self.cache();
        let is_whole = tools.servers.iter().all(|server| !server.lacks_memory);
        if is_whole && cache.forgotten == forgotten && !cache.changing.contains_key(&session) {
            if cache.sessions.len() >= CACHED {
                cache.sessions.clear();
            }
            cache.sessions.insert(session, Arc::clone(&tools));
        }
        Ok(tools)
    }

    /// Drops the cached tools of sessions, after others were stored for them.
    fn forget<'a>(&self, sessions: impl IntoIterator<Item = &'a SessionKey>) {
        let mut cache = self.cache();
        cache.forgotten += 1;
        for session in sessions {
            cache.sessions.remove(session);
        }
    }

    /// Drops the cached tools of a session, and caches none until [`Toolsets::stored`].
    fn will_store(&self, session: SessionKey) {
        let mut cache = self.cache();
        cache.sessions.remove(&session);
        *cache.changing.entry(session).or_default() += 1;
    }

    /// Notes that the toolset of a refresh was stored, or will not be.
    pub(crate) fn stored(&self, session: SessionKey) {
        let mut cache = self.cache();
        cache.forgotten += 1;
        if let Some(count) = cache.changing.get_mut(&session) {
            *count -= 1;
            if *count == 0 {
                cache.changing.remove(&session);
            }
        }
    }

    async fn assemble(&self, stored: &[SessionToolset]) -> Result<Arc<SessionTools>, Error> {
        let mut servers = Vec::with_capacity(self.servers.len());
        for server in &self.servers {
            let stored = stored.iter().find(|stored| stored.server == server.url);
            let error = stored.and_then(|stored| stored.error.clone());
            let outcome = match stored.and_then(|stored| stored.toolset.as_ref()) {
                None => None,
                Some(toolset) => Some(self.parsed(&server.url, toolset).await?),
            };
            let lacks_memory = matches!(outcome, Some(ParseOutcome::NoMemory));
            let (parsed, error) = match outcome {
                None => (None, error),
                Some(ParseOutcome::Parsed(parsed)) => (Some(parsed), error),
                Some(ParseOutcome::Invalid(why)) => (None, Some(why)),
                Some(ParseOutcome::NoMemory) => (None, Some(NO_MEMORY.into())),
            };
            let endpoint = parsed
                .as_ref()
                .and_then(|parsed| self.endpoint_problem(server, &parsed.toolset.endpoint.to_url()));
            servers.push(ServerTools {
                url: server.url.clone(),
                hash: stored.and_then(|stored| stored.toolset.as_ref()).map(|toolset| toolset.hash.clone()),
                toolset: parsed.as_ref().map(|parsed| Arc::clone(&parsed.toolset)),
                _memory: parsed.as_ref().and_then(|parsed| parsed.memory.clone()),
                lacks_memory,
                scripts: parsed.map(|parsed| parsed.scripts),
                // While the server is not running, the outcome of its last discovery is outdated.
                errors: server.failure().or(error).into_iter().chain(endpoint).collect(),
                fetched_at: stored.map_or(Timestamp(0), |stored| stored.fetched_at),
            });
        }
        Ok(Arc::new(SessionTools::assemble(servers)))
    }

    /// Returns what is wrong with the endpoint that a server names, as far as its URL tells.
    fn endpoint_problem(&self, server: &ToolServer, endpoint: &Url) -> Option<String> {
        let (base, endpoint) = (server.base().ok()?, &server.resolve(endpoint).ok()?);
        if let Err(forbidden) = self.urls.check_named_by(&base, endpoint) {
            return Some(format!("calls are refused, because the endpoint is not allowed: {forbidden}"));
        }
        let withheld = !server.credentials.is_empty() && !may_have_credentials(&self.urls, server, endpoint);
        withheld.then(|| {
            "calls are sent without credentials, because the endpoint is not on this server; add its host and port to \
             server.allow_hosts to send them there"
                .into()
        })
    }

    /// Fetches a toolset within the time for a whole fetch, however slowly the server sends it.
    async fn fetch(&self, server: &ToolServer) -> Fetched {
        let within = server.discovery_within.unwrap_or(self.limits.timeout);
        let fetched = tokio::time::timeout(within, self.fetch_now(server)).await;
        let fetched = match fetched {
            Ok(Ok(document)) => Fetched::Toolset(document),
            Ok(Err(why)) => Fetched::Failed(why),
            Err(_) => Fetched::Failed(format!("discovery took longer than {within:?}")),
        };
        match &fetched {
            Fetched::Failed(why) => self.note_failure(&server.url, why, None),
            Fetched::Toolset(_) => self.note_success(&server.url),
        }
        let mut cache = self.cache();
        match &fetched {
            Fetched::Failed(why) => tracing::warn!(server = server.url, why, "discovery failed"),
            Fetched::Toolset(document) => drop(cache.newest.insert(server.url.clone(), document.clone())),
        }
        cache.latest.insert(server.url.clone(), fetched.clone());
        fetched
    }

    async fn fetch_now(&self, server: &ToolServer) -> Result<Document, String> {
        let (body, memory) = match &self.functions {
            Some(toolset) if server.url == IN_PROCESS => (toolset.clone(), None),
            _ => self.fetch_valid(server).await?,
        };
        let digest = in_place(body.len(), || Sha256::digest(&body));
        let hash = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Document { hash, body: Arc::new(body), _memory: memory.map(Arc::new) })
    }

    /// Fetches the toolset of a server. It is valid as a whole, or it is discarded. A large one is fetched again after its
    /// memory was taken.
    async fn fetch_valid(&self, server: &ToolServer) -> Result<(Vec<u8>, Option<Grant<String>>), String> {
        server.settled().await;
        let url = server.at(DISCOVERY_PATH)?;
        let to = To::new(&url, Some(&server.url));
        let (mut memory, mut answer) = (None, self.world.http.get(to, FREE_BYTES).await);
        if let Err(client::Error::TooLong { .. }) = answer {
            memory = self.more_memory(&server.url, None, TOOLSET_BYTES).map_err(|NoMemory| NO_MEMORY)?;
            answer = self.world.http.get(to, TOOLSET_BYTES).await;
        }
        let answer = answer.map_err(|error| format!("discovery failed: {error}"))?;
        if answer.status != 200 {
            return Err(format!("discovery was answered {}{}", answer.status, reason(&answer.body)));
        }
        let body = answer.body.to_vec();
        if let Some(memory) = &mut memory {
            memory.shrink(body.len());
        }
        let _parser = self.parser().await;
        let checked = self.world.blocking.run(move || parse_toolset(&body).map(|_| body)).await;
        let checked = checked
            .ok_or_else(|| "the toolset could not be read".to_owned())?
            .map_err(|invalid| format!("the toolset is not valid: {invalid}"));
        Ok((checked?, memory))
    }

    /// Handles a 409: returns the newest known toolset of the server. If the session has it already, fetches it again,
    /// at most once a minute per session. The caller stores the toolset, and then calls [`Toolsets::stored`].
    pub(crate) async fn refresh(self: &Arc<Self>, session: SessionKey, current: &ServerTools) -> Refresh {
        let Some(server) = self.servers.iter().find(|server| server.url == current.url) else {
            return Refresh::NotNeeded;
        };
        // A fetch that runs already may have begun before the server changed its tools, so another one may follow it.
        if let Some(running) = self.fetches.running(&server.url) {
            running.ended().await;
        }
        let newest = match self.is_shared() {
            // Another node may have fetched a newer one. If that cannot be read, the toolset is fetched.
            true => self.newest(&current.url).await.ok().flatten(),
            false => self.cache().newest.get(&current.url).map(Document::to_stored),
        };
        if let Some(toolset) = newest.filter(|newest| current.hash.as_ref() != Some(&newest.hash)) {
            self.will_store(session);
            let fetched_at = self.world.now();
            let (server, toolset, error) = (current.url.clone(), Some(toolset), None);
            let source = Source::Fetched;
            return Refresh::Take(SessionToolset { session, server, toolset, error, fetched_at, source });
        }
        if let Some(pause) = self.refresh_delay(session, &current.url) {
            return Refresh::Wait(pause);
        }
        let fetched = match self.start_fetch(server, None).ended().await {
            Some(ended) => ended.fetched,
            None => Fetched::Failed("the runtime is stopping".into()),
        };
        self.will_store(session);
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
    pub(crate) async fn latest(self: &Arc<Self>) -> Result<Arc<SessionTools>, Error> {
        let latest = self.cache().latest.clone();
        let unknown = self.servers.iter().filter(|server| match latest.get(&server.url) {
            None => true,
            // The failure may have been that of an earlier process of the server.
            Some(Fetched::Failed(_)) => server.is_running(),
            Some(Fetched::Toolset(_)) => false,
        });
        let fetches: Vec<_> = unknown.map(|server| self.start_fetch(server, None)).collect();
        for fetch in fetches {
            fetch.ended_within(self.limits.wait).await;
        }
        let (at, latest) = (self.world.now(), self.cache().latest.clone());
        let pending = Fetched::Failed("discovery has not been answered yet; try again".into());
        let of = |server: &ToolServer| {
            latest.get(&server.url).unwrap_or(&pending).for_session(SessionKey::NONE, &server.url, at)
        };
        let mut stored: Vec<SessionToolset> = self.servers.iter().map(of).collect();
        if self.is_shared() {
            // Another node may have fetched newer ones.
            for known in stored.iter_mut().filter(|known| known.toolset.is_some()) {
                known.toolset = self.newest(&known.server).await?.or(known.toolset.take());
            }
        }
        self.assemble(&stored).await
    }
}

/// Returns the message of an error in the form that `rap-tool` uses, to be added to a status.
fn reason(body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = body.pointer("/error/message").and_then(serde_json::Value::as_str).unwrap_or_default();
    let shown: String = visible::text(message).chars().take(REASON_CHARS).collect();
    if shown.is_empty() { shown } else { format!(": {shown}") }
}

/// Returns true if the pause after a fetch is over. A clock that was set back does not extend it.
fn may_retry(fetched_at: Timestamp, now: Timestamp) -> bool {
    fetched_at > now || fetched_at.plus(RETRY_AFTER) <= now
}

/// Returns true if the credentials for a tool server may be sent to this URL.
pub(crate) fn may_have_credentials(urls: &UrlRules, server: &ToolServer, url: &Url) -> bool {
    server.base().is_ok_and(|base| urls.may_have_credentials(&base, url))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;
    use crate::model::scripted::Scripted;
    use crate::settings::Settings;
    use crate::store::ThreadKey;

    #[test]
    fn a_clock_that_was_set_back_does_not_delay_the_next_fetch() {
        let fetched_at = Timestamp(1_000_000);
        for (now, may) in [(999_999, true), (1_000_000, false), (1_059_999, false), (1_060_000, true)] {
            assert_eq!(may_retry(fetched_at, Timestamp(now)), may, "{now}");
        }
    }

    /// Otherwise the session would use the old tools after a 409, and be answered 409 again.
    #[tokio::test(flavor = "multi_thread")]
    async fn tools_that_were_read_before_a_refresh_was_stored_are_not_cached() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path().join("rap.db"), Arc::new(Scripted::command_driven()));
        let engine = Engine::start(settings).unwrap();
        let (toolsets, session) = (&engine.toolsets, SessionKey::of_root(ThreadKey::from_bytes([1; 8])));
        let load = async || toolsets.load(session).await.unwrap();
        let first = load().await;
        assert!(Arc::ptr_eq(&first, &load().await));
        toolsets.will_store(session);
        let (second, third) = (load().await, load().await);
        assert!(!Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&second, &third));
        let forgotten = toolsets.cache().forgotten;
        toolsets.stored(session);
        let late = toolsets.of_session(session, &[], forgotten).await.unwrap();
        let fourth = load().await;
        assert!(!Arc::ptr_eq(&late, &fourth));
        assert!(Arc::ptr_eq(&fourth, &load().await));
        engine.shut_down().await;
    }
}
