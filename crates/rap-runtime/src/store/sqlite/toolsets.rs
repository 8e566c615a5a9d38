//! Toolsets, and their assignment to sessions.

use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::store::{SessionKey, SessionToolset, Source, StoredToolset};

pub(super) fn of_session(conn: &Connection, session: SessionKey) -> rusqlite::Result<Vec<SessionToolset>> {
    let sql = "SELECT server, hash, error, fetched_at FROM session_tools WHERE root = ?1 ORDER BY server";
    let held = |row: &Row<'_>| {
        let hash: Option<String> = row.get(1)?;
        Ok(SessionToolset {
            session,
            server: row.get(0)?,
            toolset: hash.map(|hash| StoredToolset { hash, body: None }),
            error: row.get(2)?,
            fetched_at: Timestamp(row.get(3)?),
            source: Source::Fetched,
        })
    };
    conn.prepare_cached(sql)?.query_map([session], held)?.collect()
}

const SAVE_FETCHED: &str = "INSERT INTO session_tools (root, server, hash, error, fetched_at) \
     VALUES (?1, ?2, ?3, ?4, ?5) \
     ON CONFLICT (root, server) DO UPDATE SET hash = coalesce(excluded.hash, hash), error = excluded.error, \
     fetched_at = excluded.fetched_at";
const SAVE_STAND_IN: &str = "INSERT INTO session_tools (root, server, hash, error, fetched_at) \
     VALUES (?1, ?2, ?3, ?4, ?5) \
     ON CONFLICT (root, server) DO UPDATE SET hash = coalesce(hash, excluded.hash)";

/// Saves the toolset of a session. After a failed discovery the session keeps its previous toolset.
pub(super) fn save(conn: &Connection, held: &SessionToolset) -> rusqlite::Result<()> {
    let hash = held.toolset.as_ref().map(|toolset| &toolset.hash);
    if let Some(StoredToolset { hash, body: Some(body) }) = &held.toolset {
        let sql = "INSERT OR IGNORE INTO toolsets (hash, body) VALUES (?1, ?2)";
        conn.prepare_cached(sql)?.execute(params![hash, **body])?;
    }
    let mut statement = conn.prepare_cached(match held.source {
        Source::Fetched => SAVE_FETCHED,
        Source::StandIn => SAVE_STAND_IN,
    })?;
    statement.execute(params![held.session, held.server, hash, held.error, held.fetched_at.0])?;
    Ok(())
}

/// Returns the hash of the toolset that was fetched last from a server, by any session.
pub(super) fn newest(conn: &Connection, server: &str) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT hash FROM session_tools WHERE server = ?1 AND hash IS NOT NULL \
               ORDER BY fetched_at DESC LIMIT 1";
    conn.prepare_cached(sql)?.query_row([server], |row| row.get(0)).optional()
}
