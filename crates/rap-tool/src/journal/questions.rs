//! Questions to a person, and their answers. A question is known by what makes its URL unguessable.

use std::collections::BTreeMap;

use rap_protocol::{CallId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use super::{Applied, Book, Result, Seq, id, json, to_json};
use crate::rules::{Aside, Ignored, Input, Question};

/// A question that waits, or has waited, for an answer.
pub(crate) struct Stored {
    pub(crate) call: Seq,
    pub(crate) call_id: CallId,
    /// How many choices there are; none where consent is asked for.
    pub(crate) choices: usize,
    pub(crate) answer: Option<Answer>,
}

/// How a question was answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Selected(usize),
    Consented(BTreeMap<String, String>),
    /// The runtime would not take the question.
    Refused,
}

/// What came of asking.
pub(crate) enum Asked {
    /// It is on its way.
    Now(Box<Applied>),
    /// It was asked before a restart.
    Before,
}

impl Book {
    /// Asks a question, once: after a restart the same question finds what it was answered meanwhile.
    pub(crate) fn ask(
        &self,
        db: &Connection,
        call: Seq,
        name: &Question,
        aside: &Aside,
        now: Timestamp,
    ) -> Result<std::result::Result<Asked, Ignored>> {
        if find(db, name)?.is_some() {
            return Ok(Ok(Asked::Before));
        }
        let choices = match aside {
            Aside::Choice { choices, .. } => choices.len(),
            Aside::View { .. } | Aside::Authorise { .. } => 0,
        };
        let stepped = self.step(db, call, Input::Aside(aside.clone()), now)?;
        if stepped.is_ok() {
            db.prepare_cached("INSERT INTO questions (name, call, choices) VALUES (?1, ?2, ?3)")?
                .execute(params![name, call, choices as i64])?;
        }
        Ok(stepped.map(|applied| Asked::Now(Box::new(applied))))
    }
}

/// The question of this name.
pub(crate) fn find(db: &Connection, name: &Question) -> Result<Option<Stored>> {
    db.prepare_cached(
        "SELECT call, call_id, choices, answer FROM questions JOIN calls ON calls.seq = call WHERE name = ?1",
    )?
    .query_row([name], |row| {
        let choices: u32 = row.get(2)?;
        Ok(Stored {
            call: row.get(0)?,
            call_id: id(row, 1)?,
            choices: choices as usize,
            answer: json(row, 3)?,
        })
    })
    .optional()
}

/// Writes down the answer, unless there is one. The first one counts.
pub(crate) fn answer(db: &Connection, name: &Question, answer: &Answer) -> Result<()> {
    db.prepare_cached("UPDATE questions SET answer = ?2 WHERE name = ?1 AND answer IS NULL")?
        .execute(params![name, to_json(answer)])?;
    Ok(())
}

/// The runtime would not take the question: nobody will answer it.
pub(super) fn refuse(db: &Connection, name: &Question) -> Result<()> {
    answer(db, name, &Answer::Refused)
}

/// The call is over: nobody waits for answers any more.
pub(super) fn forget(db: &Connection, call: Seq) -> Result<()> {
    db.prepare_cached("DELETE FROM questions WHERE call = ?1")?.execute([call])?;
    Ok(())
}
