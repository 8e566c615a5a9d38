//! Questions to the user, and their answers. The key of a question is a hash of the secret token in its URL.

use std::collections::BTreeMap;

use rap_protocol::{CallId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use super::{Applied, CallSeq, Journal, Result, id, json, to_json};
use crate::rules::{Ignored, Input, QuestionName, UserMessage};

pub(crate) struct QuestionRow {
    pub(crate) call: CallSeq,
    pub(crate) call_id: CallId,
    /// Number of choices; 0 for a consent.
    pub(crate) choices: usize,
    pub(crate) answer: Option<Answer>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Selected(usize),
    Consented(BTreeMap<String, String>),
    /// The runtime refused the question, or it could not be delivered.
    Refused,
}

pub(crate) enum AskOutcome {
    /// The question is in the outbox.
    Sent(Box<Applied>),
    /// The question was asked before a restart.
    AlreadyAsked,
}

impl Journal {
    /// Asks a question, unless it was asked before a restart.
    pub(crate) fn ask(
        &self,
        db: &Connection,
        call: CallSeq,
        name: &QuestionName,
        message: &UserMessage,
        now: Timestamp,
    ) -> Result<std::result::Result<AskOutcome, Ignored>> {
        if find(db, name)?.is_some() {
            return Ok(Ok(AskOutcome::AlreadyAsked));
        }
        let choices = match message {
            UserMessage::Choice { choices, .. } => choices.len(),
            UserMessage::View { .. } | UserMessage::Authorize { .. } => 0,
        };
        let stepped = self.step(db, call, Input::UserMessage(message.clone()), now)?;
        if stepped.is_ok() {
            db.prepare_cached("INSERT INTO questions (name, call, choices) VALUES (?1, ?2, ?3)")?
                .execute(params![name, call, choices as i64])?;
        }
        Ok(stepped.map(|applied| AskOutcome::Sent(Box::new(applied))))
    }
}

pub(crate) fn find(db: &Connection, name: &QuestionName) -> Result<Option<QuestionRow>> {
    db.prepare_cached(
        "SELECT call, call_id, choices, answer FROM questions JOIN calls ON calls.seq = call WHERE name = ?1",
    )?
    .query_row([name], |row| {
        let choices: u32 = row.get(2)?;
        Ok(QuestionRow {
            call: row.get(0)?,
            call_id: id(row, 1)?,
            choices: choices as usize,
            answer: json(row, 3)?,
        })
    })
    .optional()
}

/// Stores an answer, unless there is one already.
pub(crate) fn answer(db: &Connection, name: &QuestionName, answer: &Answer) -> Result<()> {
    db.prepare_cached("UPDATE questions SET answer = ?2 WHERE name = ?1 AND answer IS NULL")?
        .execute(params![name, to_json(answer)])?;
    Ok(())
}

/// Records that a question could not be delivered, so that nothing waits for its answer.
pub(super) fn refuse(db: &Connection, name: &QuestionName) -> Result<()> {
    answer(db, name, &Answer::Refused)
}

/// Deletes the questions of a settled call.
pub(super) fn delete_for_call(db: &Connection, call: CallSeq) -> Result<()> {
    db.prepare_cached("DELETE FROM questions WHERE call = ?1")?.execute([call])?;
    Ok(())
}
