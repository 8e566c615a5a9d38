//! Parsed toolsets, with compiled schemas and scripts. Large ones take their memory before they are parsed.

use std::sync::Arc;

use rap_io::hashing::in_place;
use rap_protocol::limits::PARSED_BYTES;
use rap_protocol::{Toolset, check_json, parse_toolset};
use tokio::sync::SemaphorePermit;

use super::{CACHED, Toolsets};
use crate::display::Scripts;
use crate::memory::{Grant, NoMemory};
use crate::store::{Error, StoredToolset};

/// Maximum memory of the cached toolsets that need no memory of the common one, in bytes. A server may send a different
/// toolset to each session.
const CACHED_BYTES: usize = 64 * 1024 * 1024;
/// Size up to which a toolset needs no memory of the common one, in bytes, before and after it is parsed.
pub(super) const FREE_BYTES: usize = 1024 * 1024;
/// Maximum number of toolsets that are parsed at the same time.
pub(super) const PARSERS: usize = 2;

/// Memory of a large toolset.
pub(super) type ToolsetMemory = Option<Arc<Grant<String>>>;

/// A parsed toolset with its compiled display scripts.
#[derive(Clone)]
pub(super) struct Parsed {
    pub(super) toolset: Arc<Toolset>,
    pub(super) scripts: Arc<Scripts>,
    pub(super) memory: ToolsetMemory,
}

/// Outcome of parsing a toolset.
pub(super) enum ParseOutcome {
    Parsed(Parsed),
    Invalid(String),
    NoMemory,
}

impl Toolsets {
    /// Parses a stored or fetched toolset of a server. Its schemas and scripts are compiled once and cached.
    pub(super) async fn parsed(&self, server: &str, toolset: &StoredToolset) -> Result<ParseOutcome, Error> {
        let hash = toolset.hash.clone();
        let cached = || self.cache().parsed.get(&hash).cloned().map(ParseOutcome::Parsed);
        if let Some(parsed) = cached() {
            return Ok(parsed);
        }
        let body = match &toolset.body {
            Some(body) => Arc::clone(body),
            None => Arc::new(self.store.toolset(&hash).await?.unwrap_or_default()),
        };
        let _parser = self.parser().await;
        if let Some(parsed) = cached() {
            return Ok(parsed);
        }
        // Memory is taken before the toolset is parsed, and then for its compiled schemas.
        let bytes = in_place(body.len(), || check_json(&body, PARSED_BYTES)).unwrap_or(0) + body.len();
        let Ok(memory) = self.more_memory(server, None, bytes) else { return Ok(ParseOutcome::NoMemory) };
        let parse = move || parse_toolset(&body).map(|toolset| (Scripts::of(&toolset), toolset));
        let (scripts, toolset) = match self.world.blocking.run(parse).await {
            Some(Ok(parsed)) => parsed,
            Some(Err(invalid)) => {
                return Ok(ParseOutcome::Invalid(format!("the toolset is not valid: {invalid}")));
            }
            None => return Ok(ParseOutcome::Invalid("the toolset could not be read".into())),
        };
        let bytes = bytes + toolset.program_bytes();
        let Ok(memory) = self.more_memory(server, memory, bytes) else { return Ok(ParseOutcome::NoMemory) };
        let free_bytes = if memory.is_some() { 0 } else { bytes };
        let memory = memory.map(Arc::new);
        let parsed = Parsed { toolset: Arc::new(toolset), scripts: Arc::new(scripts), memory };
        let mut cache = self.cache();
        if cache.parsed.len() >= CACHED || cache.parsed_bytes + free_bytes > CACHED_BYTES {
            cache.drop_parsed();
        }
        if cache.parsed.insert(hash, parsed.clone()).is_none() {
            cache.parsed_bytes += free_bytes;
        }
        Ok(ParseOutcome::Parsed(parsed))
    }

    pub(super) async fn parser(&self) -> SemaphorePermit<'_> {
        self.parsers.acquire().await.expect("bug: this semaphore is never closed")
    }

    /// Takes memory for a toolset of a server, so that it has this many bytes. A small one needs none. If there is not
    /// enough, toolsets that are only cached are dropped. Nothing waits for memory, because a session keeps that of its
    /// other toolsets meanwhile.
    pub(super) fn more_memory(
        &self,
        server: &str,
        memory: Option<Grant<String>>,
        bytes: usize,
    ) -> Result<Option<Grant<String>>, NoMemory> {
        let has = memory.as_ref().map_or(0, Grant::bytes);
        if bytes <= FREE_BYTES || bytes <= has {
            return Ok(memory);
        }
        let take = || self.memory.take(server.to_owned(), bytes - has);
        let more = take().or_else(|NoMemory| {
            self.cache().drop_parsed();
            take()
        })?;
        Ok(Some(match memory {
            Some(mut memory) => {
                memory.merge(more);
                memory
            }
            None => more,
        }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::Engine;
    use crate::model::scripted::Scripted;
    use crate::settings::{Limits, Settings};

    const MIB: usize = 1024 * 1024;
    const SERVER: &str = "http://127.0.0.1:9";

    /// A toolset with this many small objects, which need much more memory than their text.
    fn toolset(hash: &str, objects: usize) -> StoredToolset {
        let schema = json!({"type": "object", "examples": vec![json!({"a": 1}); objects]});
        let tool = json!({"name": "work", "description": hash, "inputSchema": schema});
        let document =
            json!({"name": "t", "version": "1", "endpoint": format!("{SERVER}/invoke"), "tools": [tool]});
        StoredToolset { hash: hash.into(), body: Some(Arc::new(document.to_string().into_bytes())) }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn large_toolsets_share_a_memory_and_those_in_use_keep_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings::new(dir.path().join("rap.db"), Arc::new(Scripted::command_driven()));
        let limits = Limits { toolset_bytes: 20 * MIB, ..Limits::default() };
        let engine = Engine::start(Settings { limits, ..settings }).unwrap();
        let toolsets = &engine.toolsets;
        let parse = async |server: &str, hash: &str, objects| match toolsets
            .parsed(server, &toolset(hash, objects))
            .await
            .unwrap()
        {
            ParseOutcome::Parsed(parsed) => Some(parsed),
            ParseOutcome::NoMemory => None,
            ParseOutcome::Invalid(why) => panic!("{why}"),
        };
        let small = parse(SERVER, "small", 10).await.unwrap();
        assert!(small.memory.is_none());
        let large = parse(SERVER, "large", 15_000).await.unwrap();
        let bytes = large.memory.as_ref().unwrap().bytes();
        assert!((6 * MIB..10 * MIB).contains(&bytes), "{bytes}");
        assert_eq!(toolsets.memory.used_by(&SERVER.to_owned()), bytes);
        assert!(parse(SERVER, "another", 15_000).await.is_none(), "a server can have half");
        assert!(parse("http://127.0.0.1:8", "another", 15_000).await.is_some(), "others have the rest");
        assert!(parse(SERVER, "small", 10).await.is_some());
        // It is only cached now.
        drop(large);
        assert!(parse(SERVER, "another", 15_000).await.is_some());
        engine.shut_down().await;
    }
}
