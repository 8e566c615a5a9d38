//! Asking people: questions go out as asides, answers come in under URLs that nobody can guess.

use std::sync::Arc;
use std::time::Duration;

use rap_io::writer::Lane;
use rap_protocol::{ResponseUrl, parse_choice_answer};
use rusqlite::Connection;

use super::{Abandoned, Engine, Refusal, Run};
use crate::error::Error;
use crate::journal::Seq;
use crate::journal::questions::{self, Answer, Asked};
use crate::rules::{Aside, Ignored, Question};

/// Where a choice is answered, below the public URL.
pub(crate) const CHOICE_PATH: &str = "/choice";
/// Where a user arrives who has given consent, below the public URL.
pub(crate) const CONSENT_PATH: &str = "/consent";

/// What became of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    Taken,
    /// There is no such question, or it is over.
    Unknown,
    /// It was answered otherwise before.
    Otherwise,
}

impl Engine {
    /// The token that makes the URL of a question unguessable. It is the same after a restart.
    pub(crate) fn question_token(&self, kind: &str, identity: &[u8; 32], number: u32) -> String {
        let mac = self.book.key.mac(&[b"question", kind.as_bytes(), identity, &number.to_be_bytes()]);
        mac[..20].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn question_named(&self, kind: &str, token: &str) -> Question {
        self.book.key.mac(&[b"question name", kind.as_bytes(), token.as_bytes()])
    }

    pub(crate) fn choice_url(&self, token: &str) -> ResponseUrl {
        let url = format!("{}{CHOICE_PATH}/{token}", self.public_url);
        ResponseUrl::new(url).expect("bug: a path below the public URL is a URL")
    }

    pub(crate) fn consent_url(&self, token: &str) -> String {
        format!("{}{CONSENT_PATH}/{token}", self.public_url)
    }

    /// Asks, and waits for the answer for as long as the call lives, or until the time is over.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        call: Seq,
        run: &Run,
        name: Question,
        aside: Aside,
        within: Option<Duration>,
    ) -> Result<Option<Answer>, Error> {
        let over = || Error::new("the call is over");
        loop {
            let (news, aside) = (run.news.notified(), aside.clone());
            let asking = move |engine: &Engine, db: &Connection| {
                engine.book.ask(db, call, &name, &aside, engine.now())
            };
            let abandoned = Abandoned { due: Some(&self.due) };
            let asked = self.write(asking).await;
            abandoned.not();
            match asked {
                Some(Ok(Asked::Now(applied))) => break self.follow(call, *applied),
                Some(Ok(Asked::Before)) => break,
                Some(Err(Ignored::Full)) => news.await,
                Some(Err(_)) | None => return Err(over()),
            }
        }
        let find = || self.write(move |_, db| questions::find(db, &name));
        let answered = async {
            loop {
                let news = run.news.notified();
                match find().await.flatten() {
                    Some(questions::Stored { answer: Some(answer), .. }) => return Ok(Some(answer)),
                    Some(_) if !run.is_stopped() => news.await,
                    Some(_) | None => return Err(over()),
                }
            }
        };
        let Some(within) = within else { return answered.await };
        match tokio::time::timeout(within, answered).await {
            Ok(answered) => answered,
            // It may have come in the last moment.
            Err(_) => Ok(find().await.flatten().and_then(|question| question.answer)),
        }
    }

    /// Takes the runtime's answer to a choice.
    pub(crate) async fn choose(self: &Arc<Self>, token: &str, body: &[u8]) -> Result<Answered, Refusal> {
        let name = self.question_named(CHOICE_PATH, token);
        let Some(question) = self.writer.run(Lane::External, move |db| questions::find(db, &name)).await?
        else {
            return Ok(Answered::Unknown);
        };
        let choice = parse_choice_answer(body, question.choices).map_err(Refusal::Invalid)?;
        if choice.id != question.call_id {
            return Ok(Answered::Unknown);
        }
        self.answer(name, Answer::Selected(choice.selected)).await
    }

    /// Takes what the user's browser brings back.
    pub(crate) async fn consent(
        self: &Arc<Self>,
        token: &str,
        parameters: std::collections::BTreeMap<String, String>,
    ) -> Result<Answered, Refusal> {
        self.answer(self.question_named(CONSENT_PATH, token), Answer::Consented(parameters)).await
    }

    /// The first answer counts; the same one again is harmless.
    async fn answer(self: &Arc<Self>, name: Question, answer: Answer) -> Result<Answered, Refusal> {
        let given = answer.clone();
        let writing = move |_: &Arc<Engine>, db: &Connection| {
            questions::answer(db, &name, &given)?;
            questions::find(db, &name)
        };
        let engine = Arc::clone(self);
        let tell = move |question: Option<questions::Stored>| match question {
            None => Answered::Unknown,
            Some(question) => {
                engine.tell_news(question.call);
                if question.answer == Some(answer) { Answered::Taken } else { Answered::Otherwise }
            }
        };
        self.act_upon(writing, tell).await
    }
}
