//! Toolsets: what tool servers offer, fetched from discovery alone.
//!
//! A session holds the toolsets that it was given at its first question, by content hash. A known session goes on
//! with what it holds when a server is down; a new one asks anew. A toolset is valid as a whole or not at all, a
//! name that two servers take is offered by neither, and no server may take the name of a built-in tool.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use http::{HeaderName, HeaderValue, header};
use rap_agent::{Cause, words};
use rap_io::client::Client;
use rap_protocol::{DISCOVERY_PATH, Timestamp, Tool, Toolset, parse_toolset};
use rusqlite::{Connection, params};
use serde_json::Value;
use sha2::{Digest, Sha256};
use url::Url;

use crate::display::Scripts;
use crate::model::Offered;
use crate::settings::ToolServer;
use crate::store::{Error, SessionTool, Store, ThreadNo, now};

/// A server that failed is asked again by the session's next question, but not more often than this; and a toolset
/// is refreshed after a 409 not more often either. The first fetch is no refresh.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// How many sessions' tools are kept in memory, and how many toolsets.
const REMEMBERED: usize = 512;
/// How large the documents of the toolsets in memory are together. A server may have another one for each session.
const REMEMBERED_BYTES: usize = 64 * 1024 * 1024;
/// The largest toolset, in bytes.
const TOOLSET_BYTES: usize = rap_protocol::limits::BODY_BYTES;

pub(crate) struct Toolsets {
    servers: Vec<ToolServer>,
    client: Client,
    timeout: Duration,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    sessions: HashMap<ThreadNo, Arc<SessionTools>>,
    parsed: HashMap<String, Parsed>,
    /// The bytes of their documents.
    parsed_bytes: usize,
    /// What each server said last, to anybody.
    latest: HashMap<String, Fetched>,
    /// When a session last refreshed what it holds of a server.
    refreshed: HashMap<(ThreadNo, String), Timestamp>,
    /// Tools whose schemas take too long to check, with their servers.
    unchecked: HashSet<(String, String)>,
}

/// What discovery gave.
#[derive(Clone)]
enum Fetched {
    Toolset { hash: String, body: Arc<Vec<u8>> },
    Failed(String),
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
    pub(crate) toolset: Option<Arc<Toolset>>,
    pub(crate) scripts: Option<Arc<Scripts>>,
    pub(crate) errors: Vec<String>,
    pub(crate) fetched_at: Timestamp,
}

/// A refreshed toolset that has yet to be written.
pub(crate) struct Refreshed {
    root: ThreadNo,
    server: String,
    fetched: Fetched,
    at: Timestamp,
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
    pub(crate) fn new(servers: Vec<ToolServer>, client: Client, timeout: Duration) -> Toolsets {
        Toolsets { servers, client, timeout, memory: Mutex::default() }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a session has in memory.
    pub(crate) fn remembered(&self, root: ThreadNo) -> Option<Arc<SessionTools>> {
        self.memory().sessions.get(&root).cloned().filter(|tools| !tools.is_incomplete(now()))
    }

    /// The tools of a session. Servers that it does not know are asked now, all at once; what could not be
    /// fetched for the first time is told.
    pub(crate) async fn session(
        &self,
        store: &Store,
        root: ThreadNo,
    ) -> Result<(Arc<SessionTools>, Vec<String>), Error> {
        if let Some(tools) = self.remembered(root) {
            return Ok((tools, Vec::new()));
        }
        let known = store.session_tools(root).await?;
        let at = now();
        let wanted = |server: &&ToolServer| match known.iter().find(|held| held.server == server.url) {
            None => true,
            Some(held) => held.hash.is_none() && held.fetched_at.plus(ASK_AGAIN) <= at,
        };
        let wanted: Vec<&ToolServer> = self.servers.iter().filter(wanted).collect();
        let fetched = join_all(wanted.iter().map(|server| self.fetch(server))).await;
        let fresh: Vec<Refreshed> = wanted
            .into_iter()
            .zip(fetched)
            .map(|(server, fetched)| Refreshed { root, server: server.url.clone(), fetched, at })
            .collect();
        let news = fresh.iter().filter_map(|fresh| fresh.failure(&known)).collect();
        let tools = self.assemble(store, &known, &fresh).await?;
        if !fresh.is_empty() {
            store.write(move |conn| fresh.iter().try_for_each(|fresh| fresh.write(conn))).await?;
        }
        self.remember(root, Arc::clone(&tools));
        Ok((tools, news))
    }

    /// What a session holds, without asking any server: an invocation waits for nobody but the server that it goes to.
    pub(crate) async fn held(&self, store: &Store, root: ThreadNo) -> Result<Arc<SessionTools>, Error> {
        let remembered = self.memory().sessions.get(&root).cloned();
        if let Some(tools) = remembered {
            return Ok(tools);
        }
        let tools = self.assemble(store, &store.session_tools(root).await?, &[]).await?;
        self.remember(root, Arc::clone(&tools));
        Ok(tools)
    }

    fn remember(&self, root: ThreadNo, tools: Arc<SessionTools>) {
        let mut memory = self.memory();
        if memory.sessions.len() >= REMEMBERED {
            memory.sessions.clear();
        }
        memory.sessions.insert(root, tools);
    }

    async fn assemble(
        &self,
        store: &Store,
        known: &[SessionTool],
        fresh: &[Refreshed],
    ) -> Result<Arc<SessionTools>, Error> {
        let mut servers = Vec::with_capacity(self.servers.len());
        for server in &self.servers {
            let held = known.iter().find(|held| held.server == server.url);
            let new = fresh.iter().find(|fresh| fresh.server == server.url);
            let (hash, body, error, fetched_at) = match (new, held) {
                (Some(Refreshed { fetched: Fetched::Toolset { hash, body }, at, .. }), _) => {
                    (Some(hash.clone()), Some(Arc::clone(body)), None, *at)
                }
                (Some(Refreshed { fetched: Fetched::Failed(why), at, .. }), held) => {
                    (held.and_then(|held| held.hash.clone()), None, Some(why.clone()), *at)
                }
                (None, Some(held)) => (held.hash.clone(), None, held.error.clone(), held.fetched_at),
                // It was never asked.
                (None, None) => (None, None, None, Timestamp(0)),
            };
            let (parsed, error) = match hash {
                None => (None, error),
                Some(hash) => self.parsed(store, hash, body, error).await?,
            };
            servers.push(ServerTools {
                url: server.url.clone(),
                toolset: parsed.as_ref().map(|parsed| Arc::clone(&parsed.toolset)),
                scripts: parsed.map(|parsed| parsed.scripts),
                errors: error.into_iter().collect(),
                fetched_at,
            });
        }
        Ok(Arc::new(SessionTools::assemble(servers)))
    }

    /// A toolset that was stored or just fetched, with its schemas and scripts compiled once.
    async fn parsed(
        &self,
        store: &Store,
        hash: String,
        body: Option<Arc<Vec<u8>>>,
        error: Option<String>,
    ) -> Result<(Option<Parsed>, Option<String>), Error> {
        if let Some(parsed) = self.memory().parsed.get(&hash) {
            return Ok((Some(parsed.clone()), error));
        }
        let body = match body {
            Some(body) => body,
            None => Arc::new(store.toolset(hash.clone()).await?.unwrap_or_default()),
        };
        let bytes = body.len();
        let parse = move || {
            parse_toolset(&body).map(|toolset| Parsed {
                scripts: Arc::new(Scripts::of(&toolset)),
                toolset: Arc::new(toolset),
            })
        };
        match tokio::task::spawn_blocking(parse).await {
            Ok(Ok(parsed)) => {
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
            Ok(Err(invalid)) => Ok((None, Some(format!("the toolset is not valid: {invalid}")))),
            Err(_panicked) => Ok((None, Some("the toolset could not be read".into()))),
        }
    }

    async fn fetch(&self, server: &ToolServer) -> Fetched {
        let fetched = tokio::time::timeout(self.timeout, self.fetch_now(server)).await;
        let fetched = match fetched {
            Ok(Ok((hash, body))) => Fetched::Toolset { hash, body: Arc::new(body) },
            Ok(Err(why)) => Fetched::Failed(why),
            Err(_) => Fetched::Failed(format!("discovery took longer than {:?}", self.timeout)),
        };
        if let Fetched::Failed(why) = &fetched {
            tracing::warn!(server = server.url, why, "discovery failed");
        }
        self.memory().latest.insert(server.url.clone(), fetched.clone());
        fetched
    }

    async fn fetch_now(&self, server: &ToolServer) -> Result<(String, Vec<u8>), String> {
        let url =
            Url::parse(&format!("{}{DISCOVERY_PATH}", server.url)).map_err(|error| error.to_string())?;
        let answer = self.client.get(&url, &authorization(server), TOOLSET_BYTES).await;
        let answer = answer.map_err(|error| format!("discovery failed: {error}"))?;
        if answer.status != 200 {
            return Err(format!("discovery was answered {}", answer.status));
        }
        // Valid as a whole, or none of it is kept.
        let body = answer.body.to_vec();
        let checked = tokio::task::spawn_blocking(move || parse_toolset(&body).map(|_| body)).await;
        let body = checked
            .map_err(|_| "the toolset could not be read".to_owned())?
            .map_err(|invalid| format!("the toolset is not valid: {invalid}"))?;
        let digest = Sha256::digest(&body);
        Ok((digest.iter().map(|byte| format!("{byte:02x}")).collect(), body))
    }

    /// After a 409: the toolset as it is now, unless it was refreshed only just.
    pub(crate) async fn refresh(&self, root: ThreadNo, held: &ServerTools) -> Option<Refreshed> {
        if !self.may_refresh(root, &held.url) {
            // Whoever refreshed last may have been another thread of the session: look again, do not fetch.
            self.forget(root);
            return None;
        }
        let server = self.servers.iter().find(|server| server.url == held.url)?;
        let fetched = self.fetch(server).await;
        self.memory().sessions.remove(&root);
        Some(Refreshed { root, server: server.url.clone(), fetched, at: now() })
    }

    /// Whether a session may refresh now; whoever comes after it has to wait.
    fn may_refresh(&self, root: ThreadNo, server: &str) -> bool {
        let now = now();
        let mut memory = self.memory();
        memory.refreshed.retain(|_, at| at.plus(ASK_AGAIN) > now);
        let key = (root, server.to_owned());
        if memory.refreshed.contains_key(&key) || memory.refreshed.len() >= REMEMBERED {
            return false;
        }
        memory.refreshed.insert(key, now);
        true
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

    /// A session's tools were written anew.
    pub(crate) fn forget(&self, root: ThreadNo) {
        self.memory().sessions.remove(&root);
    }

    /// What the servers offer to anybody: what they said last, and those that were never asked are asked now.
    pub(crate) async fn survey(&self, store: &Store) -> Result<Arc<SessionTools>, Error> {
        let known: Vec<String> = self.memory().latest.keys().cloned().collect();
        let unasked = self.servers.iter().filter(|server| !known.contains(&server.url));
        join_all(unasked.map(|server| self.fetch(server))).await;
        let at = now();
        let latest = self.memory().latest.clone();
        let fresh: Vec<Refreshed> =
            latest.into_iter().map(|(server, fetched)| Refreshed { root: 0, server, fetched, at }).collect();
        self.assemble(store, &[], &fresh).await
    }
}

impl SessionTools {
    /// Whether a server that failed should be asked again.
    fn is_incomplete(&self, now: Timestamp) -> bool {
        self.servers.iter().any(|server| server.toolset.is_none() && server.fetched_at.plus(ASK_AGAIN) <= now)
    }
}

impl Refreshed {
    /// What went wrong, if the session has not heard it before.
    fn failure(&self, known: &[SessionTool]) -> Option<String> {
        let Fetched::Failed(why) = &self.fetched else { return None };
        let told = known.iter().any(|held| held.server == self.server && held.error.as_ref() == Some(why));
        (!told).then(|| format!("the tools of {} are not available: {why}", self.server))
    }

    /// Writes what the session holds from now on. A failure leaves it what it held.
    pub(crate) fn write(&self, conn: &Connection) -> rusqlite::Result<()> {
        let (hash, error) = match &self.fetched {
            Fetched::Failed(why) => (None, Some(why)),
            Fetched::Toolset { hash, body } => {
                let sql = "INSERT OR IGNORE INTO toolsets (hash, body) VALUES (?1, ?2)";
                conn.prepare_cached(sql)?.execute(params![hash, **body])?;
                (Some(hash), None)
            }
        };
        let mut statement = conn.prepare_cached(
            "INSERT INTO session_tools (root, server, hash, error, fetched_at) VALUES (?1, ?2, ?3, ?4, ?5) \
             ON CONFLICT (root, server) DO UPDATE SET hash = coalesce(excluded.hash, hash), error = excluded.error, \
             fetched_at = excluded.fetched_at",
        )?;
        statement.execute(params![self.root, self.server, hash, error, self.at.0])?;
        Ok(())
    }
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
            tracing::error!(
                server = server.url,
                "the bearer token can not stand in a header; it is not sent"
            );
            Vec::new()
        }
    }
}
