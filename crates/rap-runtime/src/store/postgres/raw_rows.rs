//! Raw rows for the examination of damage.

use std::pin::pin;

use futures_util::TryStreamExt;
use rap_protocol::Secret;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::{Address, KNOWN, PostgresError};
use crate::doctor::DoctorError;
use crate::store::raw_rows::{Cell, Table};

fn query(table: Table) -> &'static str {
    match table {
        Table::Damaged => "SELECT thread, version, why FROM damaged",
        Table::Threads => {
            "SELECT no, id, parent, source, session, inherits, ancestors, version, status, head FROM threads \
             ORDER BY no"
        }
        Table::Entries => "SELECT thread, seq, body FROM entries ORDER BY thread, seq",
        Table::Calls => "SELECT thread, id, state FROM calls ORDER BY thread, id",
        Table::Held => "SELECT thread, body FROM held ORDER BY thread, queue, no",
        Table::Backlog => "SELECT thread, body FROM backlog ORDER BY thread, call, no",
        Table::Messages => "SELECT receiver, body FROM outbox ORDER BY no",
    }
}

/// A snapshot of a database.
pub(crate) struct RawRows {
    client: Client,
    /// True if the database has the table of damaged threads.
    has_damaged: bool,
}

impl RawRows {
    pub(crate) async fn open(url: &Secret) -> Result<RawRows, DoctorError> {
        let address = Address::parse(url).map_err(PostgresError::from)?;
        let connect = |error: tokio_postgres::Error| PostgresError::Connect(error.into());
        let client = address.connect().await.map_err(connect)?;
        let failed = |error: tokio_postgres::Error| PostgresError::Prepare(error.into());
        let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = 0";
        client.batch_execute(begin).await.map_err(failed)?;
        let row = client.query_typed("SELECT version FROM rap_store", &[]).await.map_err(failed)?;
        let found = row.first().map_or(0, |row| row.get::<_, i32>(0));
        if found > KNOWN {
            return Err(DoctorError::Newer { found: found.into(), known: KNOWN.into() });
        }
        let table = "SELECT to_regclass('damaged') IS NOT NULL";
        let row = client.query_typed(table, &[]).await.map_err(failed)?;
        let has_damaged = row.first().is_some_and(|row| row.get(0));
        Ok(RawRows { client, has_damaged })
    }

    pub(crate) async fn each(
        &mut self,
        table: Table,
        take: &mut (dyn FnMut(&[Cell]) + Send),
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        if table == Table::Damaged && !self.has_damaged {
            return Ok(());
        }
        let no_parameters: [(String, Type); 0] = [];
        let rows = self.client.query_typed_raw(query(table), no_parameters).await?;
        let mut rows = pin!(rows);
        while let Some(row) = rows.try_next().await? {
            let cells: Vec<Cell> = (0..row.len()).map(|at| cell(&row, at)).collect();
            take(&cells);
        }
        Ok(())
    }
}

fn cell(row: &tokio_postgres::Row, at: usize) -> Cell {
    if *row.columns()[at].type_() == Type::INT8 {
        return match row.try_get::<_, Option<i64>>(at) {
            Ok(Some(number)) => Cell::Number(number),
            Ok(None) => Cell::Null,
            Err(_) => Cell::Other,
        };
    }
    match row.try_get::<_, Option<String>>(at) {
        Ok(Some(text)) => Cell::Text(text),
        Ok(None) => Cell::Null,
        Err(_) => Cell::Other,
    }
}
