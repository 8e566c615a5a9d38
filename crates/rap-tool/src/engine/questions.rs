//! Questions to the user: sent as messages to the user, answered at URLs that contain a secret token.

use std::sync::Arc;
use std::time::Duration;

use rap_io::writer::JobClass;
use rap_protocol::{ResponseUrl, parse_choice_answer};
use rusqlite::Connection;
use subtle::ConstantTimeEq;

use super::{DispatchOnDrop, Engine, Refusal, Run};
use crate::auth::Caller;
use crate::error::Error;
use crate::journal::CallSeq;
use crate::journal::questions::{self, Answer, AskOutcome};
use crate::rules::{Ignored, QuestionName, UserMessage};

/// Path for answers to choices, relative to the public URL.
pub(crate) const CHOICE_PATH: &str = "/choice";
/// Path for redirects after a consent, relative to the public URL.
pub(crate) const CONSENT_PATH: &str = "/consent";

/// Lengths of the parts of a question's URL, in characters.
const TOKEN_CHARS: usize = 40;
const CALLER_CHARS: usize = 32;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; CALLER_CHARS / 2]> {
    let mut bytes = [0; CALLER_CHARS / 2];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    (text.len() == CALLER_CHARS).then_some(bytes)
}

/// An answer to a question.
pub(crate) struct Answered {
    pub(crate) answer: Answer,
    /// True if the question was already there when it was asked, from before a restart.
    pub(crate) asked_before: bool,
}

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
        hex(&mac[..TOKEN_CHARS / 2])
    }

    pub(crate) fn question_name(&self, kind: &str, token: &str) -> QuestionName {
        self.journal.key.mac(&[b"question name", kind.as_bytes(), token.as_bytes()])
    }

    /// Returns the last segment of a question's URL: its token, then its caller with a MAC. So answers are counted by
    /// caller before the journal is read, and requests with invented URLs count against no caller.
    pub(crate) fn question_path(&self, caller: &Caller, token: &str) -> String {
        let (caller, mac) = (hex(caller.bytes()), self.caller_mac(caller, token));
        format!("{token}{caller}{mac}")
    }

    /// Splits the last segment of a question's URL into its token and its caller. Questions of earlier versions have no
    /// caller in their URL.
    pub(crate) fn split_question_path<'a>(&self, path: &'a str) -> (&'a str, Option<Caller>) {
        let parts = path.split_at_checked(TOKEN_CHARS);
        let Some((token, rest)) = parts.filter(|(_, rest)| !rest.is_empty()) else { return (path, None) };
        let caller = rest.split_at_checked(CALLER_CHARS).and_then(|(caller, mac)| {
            let caller = Caller::from_bytes(unhex(caller)?);
            let is_valid: bool = self.caller_mac(&caller, token).as_bytes().ct_eq(mac.as_bytes()).into();
            is_valid.then_some(caller)
        });
        match caller {
            Some(caller) => (token, Some(caller)),
            None => (path, None),
        }
    }

    fn caller_mac(&self, caller: &Caller, token: &str) -> String {
        let mac = self.journal.key.mac(&[b"question caller", caller.bytes(), token.as_bytes()]);
        hex(&mac[..8])
    }

    pub(crate) fn choice_url(&self, path: &str) -> ResponseUrl {
        let url = format!("{}{CHOICE_PATH}/{path}", self.public_url);
        ResponseUrl::new(url).expect("bug: a path below the public URL is a URL")
    }

    /// Returns the redirect URL of all calls that use an `OauthApp`. The `state` names the call.
    pub(crate) fn oauth_redirect_url(&self) -> String {
        self.consent_url.clone()
    }

    pub(crate) fn consent_url(&self, path: &str) -> String {
        format!("{}/{path}", self.consent_url)
    }

    /// Asks a question and waits for the answer until the call ends. Returns `None` after `within`, if set. `asked_before`
    /// is set if the question was already there, from before a restart.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        caller: &Caller,
        call: CallSeq,
        run: &Run,
        name: QuestionName,
        message: UserMessage,
        within: Option<Duration>,
    ) -> Result<Option<Answered>, Error> {
        let ended = || Error::new("the call has ended");
        let mut asked_before = false;
        loop {
            let (changed, message) = (run.changed.notified(), message.clone());
            let asking = move |engine: &Engine, db: &Connection| {
                engine.journal.ask(db, call, &name, &message, engine.now())
            };
            let dispatch_guard = DispatchOnDrop { due: Some(&self.due) };
            let asked = self.write_for(caller, asking).await;
            dispatch_guard.disarm();
            match asked {
                Some(Ok(AskOutcome::Sent(applied))) => break self.after_commit(call, *applied),
                Some(Ok(AskOutcome::AlreadyAsked)) => {
                    asked_before = true;
                    break;
                }
                Some(Err(Ignored::Full)) => changed.await,
                Some(Err(_)) | None => return Err(ended()),
            }
        }
        let find = || self.write_for(caller, move |_, db| questions::find(db, &name));
        let answered = async {
            loop {
                let changed = run.changed.notified();
                match find().await.flatten() {
                    Some(questions::QuestionRow { answer: Some(answer), .. }) => {
                        return Ok(Some(Answered { answer, asked_before }));
                    }
                    Some(_) if !run.is_stopped() => changed.await,
                    Some(_) | None => return Err(ended()),
                }
            }
        };
        let Some(within) = within else { return answered.await };
        match tokio::time::timeout(within, answered).await {
            Ok(answered) => answered,
            // The answer may have arrived just before the timeout.
            Err(_) => {
                let answer = find().await.flatten().and_then(|question| question.answer);
                Ok(answer.map(|answer| Answered { answer, asked_before }))
            }
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
