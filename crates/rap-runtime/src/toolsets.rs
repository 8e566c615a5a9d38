//! Toolsets: what tool servers offer, fetched from discovery alone.
//!
//! A session holds the toolsets that were fetched for its first question, by content hash, and goes on with them when a
//! server is down. A new session fetches anew; if a server does not answer, it takes the newest toolset that any session
//! has fetched. A toolset is valid as a whole or not at all, a name that two servers use is offered by neither, and no
//! server may use the name of a built-in tool.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use http::{HeaderName, HeaderValue, header};
use rap_agent::{Cause, words};
use rap_protocol::{DISCOVERY_PATH, Timestamp, Tool, Toolset, parse_toolset};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use url::Url;

use crate::display::Scripts;
use crate::model::Offered;
use crate::settings::ToolServer;
use crate::store::{Error, SessionKey, SessionToolset, Store, StoredToolset};
use crate::world::World;

/// A session asks a server that failed again at its next question, but not more often than this. After a 409 it refreshes
/// what it holds not more often either. The first fetch is no refresh.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Sessions whose tools are kept in memory, and toolsets that are.
const REMEMBERED: usize = 512;
/// Size of the documents of toolsets in memory. A server may have another one for each session.
const REMEMBERED_BYTES: usize = 64 * 1024 * 1024;
/// Sessions whose last refresh is remembered; beyond it a refresh has to wait.
const REFRESHES: usize = 65_536;
/// Bound of a toolset in bytes.
const TOOLSET_BYTES: usize = rap_protocol::limits::BODY_BYTES;

pub(crate) struct Toolsets {
    servers: Vec<ToolServer>,
    world: World,
    timeout: Duration,
    memory: Mutex<Memory>,
    /// By server: sessions that refresh at the same time share one fetch.
    refreshing: HashMap<String, tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct Memory {
    sessions: HashMap<SessionKey, Arc<SessionTools>>,
    parsed: HashMap<String, Parsed>,
    /// The bytes of their documents.
    parsed_bytes: usize,
    /// The last outcome of discovery, by server.
    latest: HashMap<String, Fetched>,
    /// The last toolset, by server.
    newest: HashMap<String, Document>,
    /// Time at which a session last refreshed what it holds of a server.
    refreshed: HashMap<(SessionKey, String), Instant>,
    /// Tools whose schemas take too long to check, with their servers.
    unchecked: HashSet<(String, String)>,
}

/// A toolset as a server sent it.
#[derive(Clone)]
struct Document {
    hash: String,
    body: Arc<Vec<u8>>,
}

/// The outcome of discovery.
#[derive(Clone)]
enum Fetched {
    Toolset(Document),
    Failed(String),
}

impl Fetched {
    /// What a session holds after it.
    fn held_by(&self, session: SessionKey, server: &str, fetched_at: Timestamp) -> SessionToolset {
        let (toolset, error) = match self {
            Fetched::Toolset(Document { hash, body }) => {
                (Some(StoredToolset { hash: hash.clone(), body: Some(Arc::clone(body)) }), None)
            }
            Fetched::Failed(why) => (None, Some(why.clone())),
        };
        SessionToolset { session, server: server.to_owned(), toolset, error, fetched_at }
    }
}

/// What a session does after its tool server answered 409.
pub(crate) enum Refresh {
    /// It holds this from now on.
    Take(SessionToolset),
    /// It holds the newest toolset already.
    Unneeded,
    /// It may refresh only after this time.
    Wait(Duration),
}

/// What an offer depends on: the agent, what set its thread going, and whether that has a parent.
type Offeree = (String, Cause, bool);

/// The tools of a session.
pub(crate) struct SessionTools {
    pub(crate) servers: Vec<ServerTools>,
    /// By name: the place of the server, and of the tool in it.
    offered: HashMap<String, (usize, usize)>,
    /// Those whose schema refers to parts of itself.
    intricate: HashSet<String>,
    /// What each agent may use, as its model is told.
    offers: Mutex<HashMap<Offeree, Arc<[Offered]>>>,
}

/// A toolset, and how its calls are shown.
#[derive(Clone)]
struct Parsed {
    toolset: Arc<Toolset>,
    scripts: Arc<Scripts>,
}

/// What a session holds of one server.
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
    /// A tool that is offered, and who offers it.
    pub(crate) fn find(&self, name: &str) -> Option<(&ServerTools, &Toolset, &Tool)> {
        let (server, tool) = *self.offered.get(name)?;
        let server = &self.servers[server];
        let toolset = server.toolset.as_deref()?;
        Some((server, toolset, &toolset.tools[tool]))
    }

    /// Whether checking arguments of this tool may take any time.
    pub(crate) fn is_intricate(&self, name: &str) -> bool {
        self.intricate.contains(name)
    }

    /// All that is offered, in the order of servers and tools.
    pub(crate) fn offered(&self) -> impl Iterator<Item = &Tool> {
        self.servers
            .iter()
            .filter_map(|server| server.toolset.as_deref())
            .flat_map(|toolset| &toolset.tools)
            .filter(|tool| self.offered.contains_key(tool.name.as_str()))
    }

    /// The same for one agent in threads of one kind, made once.
    pub(crate) fn offer_to(&self, offeree: Offeree, make: impl FnOnce() -> Arc<[Offered]>) -> Arc<[Offered]> {
        let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(offers.entry(offeree).or_insert_with(make))
    }

    pub(crate) fn server(&self, url: &str) -> Option<&ServerTools> {
        self.servers.iter().find(|server| server.url == url)
    }

    fn assemble(mut servers: Vec<ServerTools>) -> SessionTools {
        let mut takers: HashMap<String, Vec<(usize, usize)>> = HashMap::new();
        for (at, server) in servers.iter().enumerate() {
            let tools = server.toolset.iter().flat_map(|toolset| toolset.tools.iter().enumerate());
            for (place, tool) in tools {
                takers.entry(tool.name.as_str().to_owned()).or_default().push((at, place));
            }
        }
        let mut offered = HashMap::new();
        let mut clashes: Vec<(String, Vec<(usize, usize)>)> = Vec::new();
        for (name, places) in takers {
            if places.len() == 1 && !words::BUILT_IN.contains(&name.as_str()) {
                offered.insert(name, places[0]);
            } else {
                clashes.push((name, places));
            }
        }
        clashes.sort();
        for (name, places) in clashes {
            for (at, _) in &places {
                let why = if words::BUILT_IN.contains(&name.as_str()) {
                    format!("{name}: not offered; the runtime has a tool of this name itself")
                } else {
                    let others = places.iter().filter(|(other, _)| other != at);
                    let others: Vec<String> = others.map(|(other, _)| servers[*other].url.clone()).collect();
                    format!("{name}: not offered; {} has a tool of the same name", others.join(" and "))
                };
                servers[*at].errors.push(why);
            }
        }
        let refers = |(at, place): &(usize, usize)| {
            let toolset = servers[*at].toolset.as_deref();
            toolset.is_some_and(|toolset| has_reference(toolset.tools[*place].input_schema.document()))
        };
        let intricate = offered.iter().filter(|(_, place)| refers(place)).map(|(name, _)| name.clone());
        let intricate = intricate.collect();
        SessionTools { servers, offered, intricate, offers: Mutex::default() }
    }
}

impl Toolsets {
    pub(crate) fn new(servers: Vec<ToolServer>, world: World, timeout: Duration) -> Toolsets {
        let refreshing = servers.iter().map(|server| (server.url.clone(), Default::default())).collect();
        Toolsets { servers, world, timeout, memory: Mutex::default(), refreshing }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tools of a session. Servers that it does not know are asked now, all at once. Also returns what people should
    /// know of those that failed.
    pub(crate) async fn session(
        &self,
        store: &dyn Store,
        session: SessionKey,
    ) -> Result<(Arc<SessionTools>, Vec<String>), Error> {
        let at = self.world.now();
        let remembered = self.memory().sessions.get(&session).cloned();
        if let Some(tools) = remembered.filter(|tools| !tools.is_incomplete(at)) {
            return Ok((tools, Vec::new()));
        }
        let mut held = store.session_toolsets(session).await?;
        let wanted = |server: &&ToolServer| match held.iter().find(|held| held.server == server.url) {
            None => true,
            Some(held) => held.toolset.is_none() && is_over(held.fetched_at, at),
        };
        let wanted: Vec<&ToolServer> = self.servers.iter().filter(wanted).collect();
        let fetched = join_all(wanted.iter().map(|server| self.fetch(server))).await;
        let (mut fresh, mut news) = (Vec::new(), Vec::new());
        for (server, fetched) in wanted.into_iter().zip(fetched) {
            let before = held.iter().find(|held| held.server == server.url);
            let mut now = fetched.held_by(session, &server.url, at);
            if now.toolset.is_none() {
                now.toolset = self.newest(store, &server.url).await?;
            }
            news.extend(news_of(before, &now));
            fresh.push(now);
        }
        held.retain(|held| fresh.iter().all(|fresh| fresh.server != held.server));
        held.extend(fresh.iter().cloned());
        let tools = self.assemble(store, &held).await?;
        if !fresh.is_empty() {
            store.save_toolsets(fresh).await?;
        }
        self.remember(session, Arc::clone(&tools));
        Ok((tools, news))
    }

    /// The newest toolset of a server that any session has fetched.
    async fn newest(&self, store: &dyn Store, server: &str) -> Result<Option<StoredToolset>, Error> {
        let known = self.memory().newest.get(server).cloned();
        if let Some(Document { hash, body }) = known {
            return Ok(Some(StoredToolset { hash, body: Some(body) }));
        }
        Ok(store.newest_toolset(server).await?.map(|hash| StoredToolset { hash, body: None }))
    }

    /// What a session holds, without asking any server: an invocation waits for its own server only.
    pub(crate) async fn held(
        &self,
        store: &dyn Store,
        session: SessionKey,
    ) -> Result<Arc<SessionTools>, Error> {
        let remembered = self.memory().sessions.get(&session).cloned();
        if let Some(tools) = remembered {
            return Ok(tools);
        }
        let tools = self.assemble(store, &store.session_toolsets(session).await?).await?;
        self.remember(session, Arc::clone(&tools));
        Ok(tools)
    }

    fn remember(&self, session: SessionKey, tools: Arc<SessionTools>) {
        let mut memory = self.memory();
        if memory.sessions.len() >= REMEMBERED {
            memory.sessions.clear();
        }
        memory.sessions.insert(session, tools);
    }

    async fn assemble(&self, store: &dyn Store, held: &[SessionToolset]) -> Result<Arc<SessionTools>, Error> {
        let mut servers = Vec::with_capacity(self.servers.len());
        for server in &self.servers {
            let held = held.iter().find(|held| held.server == server.url);
            let error = held.and_then(|held| held.error.clone());
            let (parsed, error) = match held.and_then(|held| held.toolset.as_ref()) {
                None => (None, error),
                Some(toolset) => self.parsed(store, toolset, error).await?,
            };
            servers.push(ServerTools {
                url: server.url.clone(),
                hash: held.and_then(|held| held.toolset.as_ref()).map(|toolset| toolset.hash.clone()),
                toolset: parsed.as_ref().map(|parsed| Arc::clone(&parsed.toolset)),
                scripts: parsed.map(|parsed| parsed.scripts),
                errors: error.into_iter().collect(),
                fetched_at: held.map_or(Timestamp(0), |held| held.fetched_at),
            });
        }
        Ok(Arc::new(SessionTools::assemble(servers)))
    }

    /// A toolset that was stored or just fetched, with its schemas and scripts compiled once.
    async fn parsed(
        &self,
        store: &dyn Store,
        toolset: &StoredToolset,
        error: Option<String>,
    ) -> Result<(Option<Parsed>, Option<String>), Error> {
        let hash = toolset.hash.clone();
        if let Some(parsed) = self.memory().parsed.get(&hash) {
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
                let mut memory = self.memory();
                if memory.parsed.len() >= REMEMBERED || memory.parsed_bytes + bytes > REMEMBERED_BYTES {
                    // Sessions hold on to what they were assembled from.
                    memory.parsed.clear();
                    memory.sessions.clear();
                    memory.parsed_bytes = 0;
                }
                if memory.parsed.insert(hash, parsed.clone()).is_none() {
                    memory.parsed_bytes += bytes;
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
        let mut memory = self.memory();
        match &fetched {
            Fetched::Failed(why) => tracing::warn!(server = server.url, why, "discovery failed"),
            Fetched::Toolset(document) => drop(memory.newest.insert(server.url.clone(), document.clone())),
        }
        memory.latest.insert(server.url.clone(), fetched.clone());
        fetched
    }

    async fn fetch_now(&self, server: &ToolServer) -> Result<(String, Vec<u8>), String> {
        let url =
            Url::parse(&format!("{}{DISCOVERY_PATH}", server.url)).map_err(|error| error.to_string())?;
        let answer = self.world.http.get(&url, &authorization(server), TOOLSET_BYTES).await;
        let answer = answer.map_err(|error| format!("discovery failed: {error}"))?;
        if answer.status != 200 {
            return Err(format!("discovery was answered {}", answer.status));
        }
        // Valid as a whole, or none of it is kept.
        let body = answer.body.to_vec();
        let checked = self.world.blocking.run(move || parse_toolset(&body).map(|_| body)).await;
        let body = checked
            .ok_or_else(|| "the toolset could not be read".to_owned())?
            .map_err(|invalid| format!("the toolset is not valid: {invalid}"))?;
        let digest = Sha256::digest(&body);
        Ok((digest.iter().map(|byte| format!("{byte:02x}")).collect(), body))
    }

    /// After a 409: the session takes the newest toolset that the runtime has of the server. If it holds that one already,
    /// it is fetched anew, by each session once a minute at most.
    pub(crate) async fn refresh(&self, session: SessionKey, held: &ServerTools) -> Refresh {
        let (Some(server), Some(turn)) =
            (self.servers.iter().find(|server| server.url == held.url), self.refreshing.get(&held.url))
        else {
            return Refresh::Unneeded;
        };
        // Whoever comes while another session fetches takes what that one gets.
        let _turn = turn.lock().await;
        let newest = self.memory().newest.get(&held.url).cloned();
        let fetched = match newest {
            Some(document) if held.hash.as_ref() != Some(&document.hash) => Fetched::Toolset(document),
            _ => {
                if let Some(pause) = self.must_wait(session, &held.url) {
                    return Refresh::Wait(pause);
                }
                self.fetch(server).await
            }
        };
        self.memory().sessions.remove(&session);
        Refresh::Take(fetched.held_by(session, &held.url, self.world.now()))
    }

    /// How long a session has to wait for its next refresh. Without a wait, this counts as one.
    fn must_wait(&self, session: SessionKey, server: &str) -> Option<Duration> {
        let now = Instant::now();
        let mut memory = self.memory();
        memory.refreshed.retain(|_, at| *at + ASK_AGAIN > now);
        let key = (session, server.to_owned());
        if let Some(last) = memory.refreshed.get(&key) {
            return Some((*last + ASK_AGAIN).saturating_duration_since(now));
        }
        if memory.refreshed.len() >= REFRESHES {
            return Some(ASK_AGAIN);
        }
        memory.refreshed.insert(key, now);
        None
    }

    /// Which of these tools are not to be checked any more.
    pub(crate) fn unchecked(&self, tools: &SessionTools, names: &[&str]) -> HashSet<String> {
        let memory = self.memory();
        let given_up = |name: &&str| {
            tools.find(name).is_some_and(|(server, ..)| {
                memory.unchecked.contains(&(server.url.clone(), (*name).to_owned()))
            })
        };
        names.iter().copied().filter(given_up).map(str::to_owned).collect()
    }

    /// None of these tools is checked any more.
    pub(crate) fn give_up_checking(&self, tools: &SessionTools, names: &[&str]) -> HashSet<String> {
        let mut memory = self.memory();
        for name in names {
            if let Some((server, ..)) = tools.find(name) {
                memory.unchecked.insert((server.url.clone(), (*name).to_owned()));
            }
        }
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// What the servers offer to anybody: the last outcome of discovery. Those that were never asked are asked now.
    pub(crate) async fn survey(&self, store: &dyn Store) -> Result<Arc<SessionTools>, Error> {
        let known: Vec<String> = self.memory().latest.keys().cloned().collect();
        let unasked = self.servers.iter().filter(|server| !known.contains(&server.url));
        join_all(unasked.map(|server| self.fetch(server))).await;
        let (at, latest) = (self.world.now(), self.memory().latest.clone());
        let held: Vec<SessionToolset> =
            latest.iter().map(|(server, fetched)| fetched.held_by(SessionKey::NONE, server, at)).collect();
        self.assemble(store, &held).await
    }
}

impl SessionTools {
    /// Whether a server that failed should be asked again.
    fn is_incomplete(&self, now: Timestamp) -> bool {
        self.servers.iter().any(|server| server.toolset.is_none() && is_over(server.fetched_at, now))
    }
}

/// Whether the pause after a fetch is over. A clock that was set back does not make it longer.
fn is_over(fetched_at: Timestamp, now: Timestamp) -> bool {
    fetched_at > now || fetched_at.plus(ASK_AGAIN) <= now
}

/// What people should know of a server that failed, if the session has not heard it before.
fn news_of(before: Option<&SessionToolset>, now: &SessionToolset) -> Option<String> {
    let why = now.error.as_ref()?;
    let told = before.is_some_and(|before| before.error.as_ref() == Some(why));
    let news = match now.toolset {
        None => format!("the tools of {} are not available: {why}", now.server),
        Some(_) => format!(
            "the tools of {} could not be fetched: {why}; those that another session fetched last are used",
            now.server
        ),
    };
    (!told).then_some(news)
}

/// Whether a schema refers to a part of itself. Without that, checking takes no more steps than it has parts, for each
/// part of what is checked.
fn has_reference(schema: &Value) -> bool {
    const REFERENCES: [&str; 3] = ["$ref", "$dynamicRef", "$recursiveRef"];
    match schema {
        Value::Object(fields) => {
            fields.iter().any(|(key, value)| REFERENCES.contains(&key.as_str()) || has_reference(value))
        }
        Value::Array(items) => items.iter().any(has_reference),
        _ => false,
    }
}

/// How we show a tool server who we are.
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
