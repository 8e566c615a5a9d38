//! Tokens of clients. Only their digests are stored.

use rap_api::TokenScope;
use rap_protocol::{Timestamp, UserId};
use tokio_postgres::Row;

use super::connect::Connections;
use super::heads::{timestamp, timestamp_or_none};
use super::statement::{Failure, Statement, get, unreadable};
use crate::store::{ClientToken, Cursor, NewClientToken, Page, PageRequest, TokenDigest, TokenId};

const COLUMNS: &str = "no, name, scope, user_id, created_at, used_at";

/// Adds a token. Returns `None` if there are `max` already.
pub(super) async fn add(
    connections: &Connections,
    token: &NewClientToken,
    max: usize,
) -> Result<Option<TokenId>, Failure> {
    let sql = "INSERT INTO tokens (digest, name, scope, user_id, created_at) SELECT $1, $2, $3, $4, $5 \
               WHERE (SELECT count(*) FROM tokens) < $6 RETURNING no";
    let insert = Statement::new(sql)
        .with(token.digest.0.to_vec())
        .text(&token.name)
        .text(token.scope.as_str())
        .with(token.user.as_ref().map(|user| user.as_str().to_owned()))
        .with(token.created_at.0)
        .with(max as i64);
    // The lock keeps two nodes from adding the last token at once.
    let lock = Statement::command("LOCK TABLE tokens IN SHARE ROW EXCLUSIVE MODE");
    let rows = connections.write(vec![lock, insert]).await?;
    rows[1].first().map(|row| get(row, 0).map(TokenId)).transpose()
}

pub(super) async fn find(
    connections: &Connections,
    digest: &TokenDigest,
) -> Result<Option<ClientToken>, Failure> {
    let sql = format!("SELECT {COLUMNS} FROM tokens WHERE digest = $1");
    let rows = connections.read_one(Statement::new(sql).with(digest.0.to_vec())).await?;
    rows.first().map(token).transpose()
}

/// Lists tokens, oldest first.
pub(super) async fn list(
    connections: &Connections,
    page_request: &PageRequest,
) -> Result<Page<ClientToken>, Failure> {
    let sql = format!("SELECT {COLUMNS} FROM tokens WHERE no > $1 ORDER BY no LIMIT $2");
    let PageRequest { after, limit } = page_request;
    let statement = Statement::new(sql).with(after.at.unwrap_or(0)).with(*limit as i64 + 1);
    let found = connections.read_one(statement).await?;
    let mut rows = found.iter().map(token).collect::<Result<Vec<ClientToken>, Failure>>()?;
    let more = rows.len() > *limit;
    rows.truncate(*limit);
    let next = rows.last().filter(|_| more).map(|last| Cursor { at: Some(last.id.0), ..Cursor::default() });
    Ok(Page { rows, next })
}

pub(super) fn used(id: TokenId, at: Timestamp) -> Statement {
    Statement::new("UPDATE tokens SET used_at = $2 WHERE no = $1 AND coalesce(used_at, 0) < $2")
        .with(id.0)
        .with(at.0)
}

/// Removes a token. Returns false if there is none with this id.
pub(super) async fn revoke(connections: &Connections, id: TokenId) -> Result<bool, Failure> {
    let delete = Statement::new("DELETE FROM tokens WHERE no = $1 RETURNING no").with(id.0);
    Ok(!connections.write(vec![delete]).await?[0].is_empty())
}

fn token(row: &Row) -> Result<ClientToken, Failure> {
    Ok(ClientToken {
        id: TokenId(get(row, 0)?),
        name: get(row, 1)?,
        scope: TokenScope::from(get::<&str>(row, 2)?),
        user: get::<Option<String>>(row, 3)?.map(UserId::new).transpose().map_err(unreadable)?,
        created_at: timestamp(row, 4)?,
        used_at: timestamp_or_none(row, 5)?,
    })
}
