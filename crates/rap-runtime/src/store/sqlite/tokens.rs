//! Tokens of clients. Only their digests are stored.

use rap_api::TokenScope;
use rap_protocol::{Timestamp, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::heads::unreadable;
use crate::store::{ClientToken, Cursor, NewClientToken, Page, PageRequest, TokenDigest, TokenId};

const COLUMNS: &str = "no, name, scope, user_id, created_at, used_at";

/// Adds a token. Returns `None` if there are `max` already.
pub(super) fn add(
    conn: &Connection,
    token: &NewClientToken,
    max: usize,
) -> rusqlite::Result<Option<TokenId>> {
    let mut statement = conn.prepare_cached(
        "INSERT INTO tokens (digest, name, scope, user_id, created_at) SELECT ?1, ?2, ?3, ?4, ?5 \
         WHERE (SELECT count(*) FROM tokens) < ?6 RETURNING no",
    )?;
    let row = params![
        token.digest.0.as_slice(),
        token.name,
        token.scope.as_str(),
        token.user.as_ref().map(UserId::as_str),
        token.created_at.0,
        max as i64,
    ];
    statement.query_row(row, |row| row.get(0).map(TokenId)).optional()
}

pub(super) fn find(conn: &Connection, digest: &TokenDigest) -> rusqlite::Result<Option<ClientToken>> {
    let sql = format!("SELECT {COLUMNS} FROM tokens WHERE digest = ?1");
    conn.prepare_cached(&sql)?.query_row([digest.0.as_slice()], token).optional()
}

/// Lists tokens, oldest first.
pub(super) fn list(conn: &Connection, page_request: &PageRequest) -> rusqlite::Result<Page<ClientToken>> {
    let sql = format!("SELECT {COLUMNS} FROM tokens WHERE no > ?1 ORDER BY no LIMIT ?2");
    let PageRequest { after, limit } = page_request;
    let parameters = params![after.at.unwrap_or(0), *limit as i64 + 1];
    let mut rows: Vec<ClientToken> =
        conn.prepare_cached(&sql)?.query_map(parameters, token)?.collect::<rusqlite::Result<_>>()?;
    let more = rows.len() > *limit;
    rows.truncate(*limit);
    let next = rows.last().filter(|_| more).map(|last| Cursor { at: Some(last.id.0), ..Cursor::default() });
    Ok(Page { rows, next })
}

pub(super) fn used(conn: &Connection, id: TokenId, at: Timestamp) -> rusqlite::Result<()> {
    let sql = "UPDATE tokens SET used_at = ?2 WHERE no = ?1 AND coalesce(used_at, 0) < ?2";
    conn.prepare_cached(sql)?.execute(params![id.0, at.0])?;
    Ok(())
}

/// Removes a token. Returns false if there is none with this id.
pub(super) fn revoke(conn: &Connection, id: TokenId) -> rusqlite::Result<bool> {
    Ok(conn.prepare_cached("DELETE FROM tokens WHERE no = ?1")?.execute([id.0])? == 1)
}

fn token(row: &Row<'_>) -> rusqlite::Result<ClientToken> {
    Ok(ClientToken {
        id: TokenId(row.get(0)?),
        name: row.get(1)?,
        scope: TokenScope::from(row.get_ref(2)?.as_str()?),
        user: row.get::<_, Option<String>>(3)?.map(UserId::new).transpose().map_err(unreadable)?,
        created_at: Timestamp(row.get(4)?),
        used_at: row.get::<_, Option<i64>>(5)?.map(Timestamp),
    })
}
