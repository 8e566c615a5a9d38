//! Requests of clients that must not count twice: the same key stands for the same request, and for what it led to.

use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::rows::id;
use super::{Error, Ran, Receipt, now};

/// Tells the requests of clients apart: the same one twice counts once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Once {
    /// A digest of the client's key and what it counts for.
    pub(crate) key: [u8; 32],
    /// A digest of what is asked.
    pub(crate) request: [u8; 32],
}

/// Does it, unless a request with the same key was done before; then what that led to is the answer, if it was the same.
pub(super) fn once(
    conn: &Connection,
    mark: Option<Once>,
    job: impl FnOnce() -> rusqlite::Result<Ran>,
) -> rusqlite::Result<Ran> {
    let Some(mark) = mark else { return job() };
    if let Some((receipt, same)) = repeated(conn, &mark)? {
        return Ok(if same { Ran::Done(Vec::new(), receipt) } else { Ran::Refused(Error::KeyReused) });
    }
    let ran = job()?;
    if let Ran::Done(_, receipt) = &ran {
        remember(conn, &mark, receipt, now())?;
    }
    Ok(ran)
}

/// What a request of the same key led to, and whether it was the same request.
fn repeated(conn: &Connection, once: &Once) -> rusqlite::Result<Option<(Receipt, bool)>> {
    let mut statement =
        conn.prepare_cached("SELECT thread, turn, request = ?2 FROM repeats WHERE digest = ?1")?;
    let found = |row: &Row<'_>| {
        let receipt = Receipt { thread: id(row, 0)?, turn: row.get::<_, i64>(1)?.unsigned_abs() };
        Ok((receipt, row.get(2)?))
    };
    statement.query_row(params![once.key.as_slice(), once.request.as_slice()], found).optional()
}

fn remember(conn: &Connection, once: &Once, receipt: &Receipt, now: Timestamp) -> rusqlite::Result<()> {
    let sql = "INSERT INTO repeats (digest, request, thread, turn, at) VALUES (?1, ?2, ?3, ?4, ?5)";
    let (thread, turn) = (receipt.thread.as_str(), receipt.turn.cast_signed());
    let row = params![once.key.as_slice(), once.request.as_slice(), thread, turn, now.0];
    conn.prepare_cached(sql)?.execute(row)?;
    Ok(())
}
