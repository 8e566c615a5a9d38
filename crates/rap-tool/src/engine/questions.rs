//! Questions to the user: sent as asides, answered at URLs that contain a secret token.

use std::sync::Arc;
use std::time::Duration;

use rap_io::writer::JobClass;
use rap_protocol::{ResponseUrl, parse_choice_answer};
use rusqlite::Connection;

use super::{DispatchOnDrop, Engine, Refusal, Run};
use crate::auth::Caller;
use crate::error::Error;
use crate::journal::CallSeq;
use crate::journal::questions::{self, Answer, AskOutcome};
use crate::rules::{Aside, Ignored, QuestionName};

/// Path for answers to choices, relative to the public URL.
pub(crate) const CHOICE_PATH: &str = "/choice";
/// Path for redirects after a consent, relative to the public URL.
pub(crate) const CONSENT_PATH: &str = "/consent";

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AnswerOutcome {
    Accepted,
    /// There is no such question, or its call has ended.
    Unknown,
    /// The question already has a different answer.
    Conflict,
}

impl Engine {
    /// Returns the secret token in the URL of a question. It is the same after a restart.
    pub(crate) fn question_token(&self, kind: &str, identity: &[u8; 32], number: u32) -> String {
        let mac = self.journal.key.mac(&[b"question", kind.as_bytes(), identity, &number.to_be_bytes()]);
        mac[..20].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn question_name(&self, kind: &str, token: &str) -> QuestionName {
        self.journal.key.mac(&[b"question name", kind.as_bytes(), token.as_bytes()])
    }

    pub(crate) fn choice_url(&self, token: &str) -> ResponseUrl {
        let url = format!("{}{CHOICE_PATH}/{token}", self.public_url);
        ResponseUrl::new(url).expect("bug: a path below the public URL is a URL")
    }

    pub(crate) fn consent_url(&self, token: &str) -> String {
        format!("{}{CONSENT_PATH}/{token}", self.public_url)
    }

    /// Asks a question and waits for the answer until the call ends. Returns `None` after `within`, if set.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        caller: &Caller,
        call: CallSeq,
        run: &Run,
        name: QuestionName,
        aside: Aside,
        within: Option<Duration>,
    ) -> Result<Option<Answer>, Error> {
        let ended = || Error::new("the call has ended");
        loop {
            let (changed, aside) = (run.changed.notified(), aside.clone());
            let asking = move |engine: &Engine, db: &Connection| {
                engine.journal.ask(db, call, &name, &aside, engine.now())
            };
            let dispatch_guard = DispatchOnDrop { due: Some(&self.due) };
            let asked = self.write_for(caller, asking).await;
            dispatch_guard.disarm();
            match asked {
                Some(Ok(AskOutcome::Sent(applied))) => break self.after_commit(call, *applied),
                Some(Ok(AskOutcome::AlreadyAsked)) => break,
                Some(Err(Ignored::Full)) => changed.await,
                Some(Err(_)) | None => return Err(ended()),
            }
        }
        let find = || self.write_for(caller, move |_, db| questions::find(db, &name));
        let answered = async {
            loop {
                let changed = run.changed.notified();
                match find().await.flatten() {
                    Some(questions::QuestionRow { answer: Some(answer), .. }) => return Ok(Some(answer)),
                    Some(_) if !run.is_stopped() => changed.await,
                    Some(_) | None => return Err(ended()),
                }
            }
        };
        let Some(within) = within else { return answered.await };
        match tokio::time::timeout(within, answered).await {
            Ok(answered) => answered,
            // The answer may have arrived just before the timeout.
            Err(_) => Ok(find().await.flatten().and_then(|question| question.answer)),
        }
    }

    /// Stores the runtime's answer to a choice.
    pub(crate) async fn choose(self: &Arc<Self>, token: &str, body: &[u8]) -> Result<AnswerOutcome, Refusal> {
        let name = self.question_name(CHOICE_PATH, token);
        let Some(question) =
            self.writer.run(JobClass::External, move |db| questions::find(db, &name)).await?
        else {
            return Ok(AnswerOutcome::Unknown);
        };
        let choice = parse_choice_answer(body, question.choices).map_err(Refusal::Invalid)?;
        if choice.id != question.call_id {
            return Ok(AnswerOutcome::Unknown);
        }
        self.answer(name, Answer::Selected(choice.selected)).await
    }

    /// Stores the query parameters of the redirect after a consent.
    pub(crate) async fn consent(
        self: &Arc<Self>,
        token: &str,
        parameters: std::collections::BTreeMap<String, String>,
    ) -> Result<AnswerOutcome, Refusal> {
        self.answer(self.question_name(CONSENT_PATH, token), Answer::Consented(parameters)).await
    }

    /// Stores an answer. Only the first one is kept; a repeat of it is accepted as well.
    async fn answer(self: &Arc<Self>, name: QuestionName, answer: Answer) -> Result<AnswerOutcome, Refusal> {
        let given = answer.clone();
        let writing = move |_: &Arc<Engine>, db: &Connection| {
            questions::answer(db, &name, &given)?;
            questions::find(db, &name)
        };
        let engine = Arc::clone(self);
        let tell = move |question: Option<questions::QuestionRow>| match question {
            None => AnswerOutcome::Unknown,
            Some(question) => {
                engine.wake_handler(question.call);
                if question.answer == Some(answer) {
                    AnswerOutcome::Accepted
                } else {
                    AnswerOutcome::Conflict
                }
            }
        };
        self.write_then(writing, tell).await
    }
}
