//! The tools of a session. A tool name that two servers use is not offered, nor is the name of a built-in tool.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use rap_agent::{Cause, texts};
use rap_protocol::{Timestamp, Tool, Toolset};

use super::{ToolsetMemory, may_retry};
use crate::display::Scripts;
use crate::model::OfferedTool;
use crate::store::SessionToolset;

/// Name of the agent, cause of its thread, and whether the thread has a parent. The offered tools depend on these.
type OfferKey = (String, Cause, bool);

pub(crate) struct SessionTools {
    pub(crate) servers: Vec<ServerTools>,
    /// Index of the server and of the tool in its toolset, by name of the tool.
    offered: HashMap<String, (usize, usize)>,
    /// Cache of the tools that are offered to each agent's model.
    offers: Mutex<HashMap<OfferKey, Arc<[OfferedTool]>>>,
}

/// Tools of one server in a session.
pub(crate) struct ServerTools {
    pub(crate) url: String,
    /// Hash of the toolset.
    pub(super) hash: Option<String>,
    pub(crate) toolset: Option<Arc<Toolset>>,
    pub(crate) scripts: Option<Arc<Scripts>>,
    /// True if its toolset is not there because the toolsets in use need too much memory.
    pub(crate) lacks_memory: bool,
    pub(super) _memory: ToolsetMemory,
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

    /// Returns true if it was assembled from these toolsets.
    pub(super) fn is_current(&self, stored: &[SessionToolset]) -> bool {
        self.servers.iter().all(|server| {
            let stored = stored.iter().find(|stored| stored.server == server.url);
            let hash = stored.and_then(|stored| stored.toolset.as_ref()).map(|toolset| &toolset.hash);
            let fetched_at = stored.map_or(Timestamp(0), |stored| stored.fetched_at);
            (hash, fetched_at) == (server.hash.as_ref(), server.fetched_at)
        })
    }

    pub(crate) fn server(&self, url: &str) -> Option<&ServerTools> {
        self.servers.iter().find(|server| server.url == url)
    }

    /// Returns true if a server that failed should be asked again.
    pub(super) fn needs_discovery(&self, now: Timestamp) -> bool {
        self.servers.iter().any(|server| server.toolset.is_none() && may_retry(server.fetched_at, now))
    }

    pub(super) fn assemble(mut servers: Vec<ServerTools>) -> SessionTools {
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
