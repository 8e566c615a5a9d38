//! `rap chat`: talk to an agent, and see what it does.
//!
//! What is shown comes from the event stream alone, which goes on where it was after the runtime has restarted.

mod console;
mod editor;
mod keys;
mod screen;
mod streamed;
mod terminal;
mod view;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use http::HeaderValue;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use self::console::Console;
use self::editor::Input;
use self::view::View;
use super::inbox::{meant, numbered};
use super::{Connection, known};
use crate::api::{Asked, CallState, Question, Status, StatusNews};
use crate::client::{Client, Error, Event, Follower, News, Pauses, idempotency_key};
use crate::rest::Rest;
use crate::table::{DIM, one_line, styled};

/// A second ^C within this time leaves.
const TWICE: Duration = Duration::from_secs(2);
/// How often it is said anew how long calls have been running, and looked whether it is time to try again to say what
/// was not taken.
const TICK: Duration = Duration::from_millis(500);
/// How much that was said may wait for the runtime.
const OUTGOING: usize = 100;
/// How long leaving waits for the runtime to take what was said.
const FAREWELL: Duration = Duration::from_secs(2);

/// Whom to talk to.
#[derive(Args)]
#[command(
    after_help = "On a pipe, each line is said when the agent has come to rest, or answers its question.\n\
                        Example: echo 'say hello' | rap chat"
)]
pub struct Chat {
    /// The thread; a new one is made if none is given.
    pub thread: Option<String>,
    /// The agent of a new thread.
    #[arg(long, conflicts_with = "thread")]
    pub agent: Option<String>,
    /// Which runtime.
    #[command(flatten)]
    pub connection: Connection,
}

/// Talks until somebody leaves.
pub async fn run(chat: Chat) -> anyhow::Result<()> {
    let client = chat.connection.client()?;
    let thread = match &chat.thread {
        Some(id) => known(&client, id, client.thread(id).await).await?,
        None => {
            let new = chat.agent.as_ref().map_or(json!({}), |agent| json!({"agent": agent}));
            client.create_thread(&new).await?
        }
    };
    if thread.status == Status::Closed {
        bail!("thread {} is closed; rap chat makes a new one", thread.id);
    }
    let mut view = View::new(Console::open()?);
    view.hello(&thread.id, &thread.agent)?;
    Conversation {
        follower: Follower::new(client.clone(), &thread.id, 0),
        client,
        id: thread.id,
        view,
        rest: Rest::default(),
        questions: VecDeque::new(),
        outgoing: VecDeque::new(),
        saying: false,
        say_at: Instant::now(),
        pauses: Pauses::default(),
        under_way: JoinSet::new(),
        interrupted: None,
        ended: false,
        why: None,
    }
    .run()
    .await
}

struct Conversation {
    client: Client,
    id: String,
    follower: Follower,
    view: View,
    rest: Rest,
    questions: VecDeque<Question>,
    /// What the runtime has not taken yet, and whether the first of it is on its way.
    outgoing: VecDeque<(String, HeaderValue)>,
    saying: bool,
    /// When it is sent, and the pauses between attempts.
    say_at: Instant,
    pauses: Pauses,
    /// Requests, beside which keys are read and news told.
    under_way: JoinSet<Done>,
    interrupted: Option<Instant>,
    /// Whether the input is at its end.
    ended: bool,
    why: Option<String>,
}

/// A request that has an answer.
enum Done {
    Said(Result<(), Error>),
    Answered(Box<Question>, Result<(), Error>),
    Stopped(Result<(), Error>),
}

/// Whether the chat goes on.
#[derive(PartialEq)]
enum Flow {
    On,
    Leave,
}

impl Conversation {
    async fn run(mut self) -> anyhow::Result<()> {
        let mut tick = tokio::time::interval(TICK);
        let mut interrupts = signal(SignalKind::interrupt())?;
        loop {
            let reads = self.wants_input();
            let flow = tokio::select! {
                news = self.follower.next() => self.learn(news?)?,
                input = self.view.console.next(), if reads => self.act(input?)?,
                Some(done) = self.under_way.join_next() => {
                    self.done(done?)?;
                    Flow::On
                }
                _ = interrupts.recv() => self.stop()?,
                _ = tick.tick() => {
                    self.say_next();
                    Flow::On
                }
            };
            if flow == Flow::Leave {
                return self.leave().await;
            }
            self.view.refresh()?;
            if self.ended && self.outgoing.is_empty() {
                if self.rest.is_reached() {
                    return self.leave().await;
                }
                self.nobody_answers()?;
            }
        }
    }

    /// A person can speak at any time; the lines of a pipe wait for their turn.
    fn wants_input(&self) -> bool {
        let choice = self.questions.iter().any(|question| matches!(question.asked, Asked::Choice { .. }));
        let turn = self.outgoing.is_empty() && (self.rest.is_reached() || choice);
        !self.ended && (self.view.console.is_terminal() || turn)
    }

    /// What is on its way arrives; what the runtime did not take is told.
    async fn leave(mut self) -> anyhow::Result<()> {
        let farewell = async {
            while let Some(done) = self.under_way.join_next().await {
                self.done(done?)?;
            }
            anyhow::Ok(())
        };
        if let Ok(outcome) = tokio::time::timeout(FAREWELL, farewell).await {
            outcome?;
        }
        for (text, _) in &self.outgoing {
            self.view.warn(&format!("not said, since the runtime is away: {}", one_line(text)))?;
        }
        if self.view.console.is_terminal() {
            let hint = format!("the agent goes on without you; come back with: rap chat {}", self.id);
            self.view.put(&styled(DIM, &hint))?;
        } else if self.rest.status() == Some(Status::Failed) {
            bail!("the agent failed: {}", self.why.unwrap_or_default());
        }
        Ok(())
    }

    /// At the end of a pipe, a question stays open for ever.
    fn nobody_answers(&self) -> anyhow::Result<()> {
        for Question { call_id, asked, .. } in &self.questions {
            if let Asked::Choice { prompt, choices, .. } = asked {
                let choices = numbered(choices).join(", ");
                let how = format!("rap inbox answer {} {call_id} CHOICE", self.id);
                bail!("the agent needs an answer: {prompt} {choices}\nanswer with: {how}");
            }
        }
        Ok(())
    }

    fn learn(&mut self, news: News) -> anyhow::Result<Flow> {
        if let Some(words) = news.words() {
            self.view.note(&words)?;
        }
        let event = match news {
            News::Event(event) => event,
            News::LeftOut(_) => return Ok(Flow::On),
            News::Lost => {
                self.view.drop_answer();
                return Ok(Flow::On);
            }
            News::Back => {
                self.rest.start_over();
                self.questions.clear();
                self.view.start_over();
                self.say_at = Instant::now();
                return Ok(Flow::On);
            }
        };
        self.rest.see(&event);
        match event {
            Event::Entry(entry) => self.view.entry(&entry)?,
            Event::Delta(delta) => self.view.delta(&delta),
            Event::Call(news) => {
                if news.state == CallState::Settled {
                    self.questions.retain(|question| question.call_id != news.call.call_id);
                }
                self.view.call(news);
            }
            Event::Question(question) => {
                self.view.question(&question)?;
                self.questions.push_back(question);
            }
            Event::Notice(text) => {
                self.view.drop_answer();
                self.view.note(&one_line(&text))?;
            }
            Event::Status(news) => return self.learn_status(news),
            Event::View(_) => {}
        }
        Ok(Flow::On)
    }

    fn learn_status(&mut self, news: StatusNews) -> anyhow::Result<Flow> {
        self.view.status(&news)?;
        if news.status != Status::NeedsYou {
            self.questions.clear();
        }
        if let Some(why) = news.why.as_ref().filter(|_| news.why != self.why) {
            self.view.why(&self.id, news.status, why)?;
        }
        self.why = news.why;
        if news.status == Status::Closed {
            self.view.note("the thread is closed")?;
            return Ok(Flow::Leave);
        }
        Ok(Flow::On)
    }

    fn act(&mut self, input: Input) -> anyhow::Result<Flow> {
        match input {
            Input::Line(line) => self.take_line(line.trim())?,
            Input::Interrupt => return self.stop(),
            Input::End if self.view.console.is_terminal() => return Ok(Flow::Leave),
            Input::End => self.ended = true,
        }
        Ok(Flow::On)
    }

    fn take_line(&mut self, line: &str) -> anyhow::Result<()> {
        if line.is_empty() || self.answer(line)? {
            return Ok(());
        }
        if self.outgoing.len() >= OUTGOING {
            return self.view.warn("not said: too much waits for the runtime already");
        }
        self.view.say(line)?;
        self.rest.expect(line);
        self.outgoing.push_back((line.to_owned(), idempotency_key()));
        self.say_next();
        Ok(())
    }

    /// Takes a line as the answer to the oldest question, if it is one.
    fn answer(&mut self, line: &str) -> anyhow::Result<bool> {
        let open = self.questions.iter().enumerate().find_map(|(place, question)| match &question.asked {
            Asked::Choice { choices, .. } => {
                let selected = meant(choices, line)?;
                Some((place, selected, choices[selected].clone()))
            }
            Asked::SignIn { .. } => None,
        });
        let Some((place, selected, choice)) = open else { return Ok(false) };
        let Some(question) = self.questions.remove(place) else { return Ok(false) };
        self.view.answered(&choice)?;
        self.rest.wait_for_status();
        let (client, id) = (self.client.clone(), self.id.clone());
        self.under_way.spawn(async move {
            let outcome = client.choose(&id, &question.call_id, Some(selected)).await;
            Done::Answered(Box::new(question), outcome.map(drop))
        });
        Ok(true)
    }

    /// Says what was not taken yet, one after the other. The runtime may be away; then it is said when it is back.
    fn say_next(&mut self) {
        let may = !self.saying && Instant::now() >= self.say_at;
        let Some((text, key)) = self.outgoing.front().cloned().filter(|_| may) else { return };
        self.saying = true;
        let (client, id) = (self.client.clone(), self.id.clone());
        self.under_way
            .spawn(async move { Done::Said(client.say(&id, &json!({"text": text}), &key).await.map(drop)) });
    }

    fn done(&mut self, done: Done) -> anyhow::Result<()> {
        match done {
            Done::Said(outcome) => {
                self.saying = false;
                if outcome.as_ref().is_err_and(Error::is_passing) {
                    self.say_at = Instant::now() + self.pauses.take();
                    return Ok(());
                }
                self.pauses.reset();
                self.follower.hurry();
                let said = self.outgoing.pop_front();
                if let (Err(error), Some((text, _))) = (outcome, said) {
                    self.rest.forget(&text);
                    self.view.unsay(&text, &error.to_string())?;
                }
                self.say_next();
            }
            Done::Answered(question, Err(error)) => {
                if error.is_passing() {
                    self.questions.push_front(*question);
                }
                self.view.warn(&format!("not answered: {error}"))?;
            }
            Done::Stopped(Ok(())) => self.view.note("stopped; ^C again or ^D leaves")?,
            Done::Stopped(Err(error)) => self.view.warn(&format!("not stopped: {error}"))?,
            Done::Answered(_, Ok(())) => {}
        }
        Ok(())
    }

    /// The first ^C stops the agent, a second one soon after leaves.
    fn stop(&mut self) -> anyhow::Result<Flow> {
        if self.interrupted.is_some_and(|at| at.elapsed() < TWICE) {
            return Ok(Flow::Leave);
        }
        self.interrupted = Some(Instant::now());
        if self.rest.is_reached() {
            self.view.note("the agent does nothing; ^C again or ^D leaves")?;
            return Ok(Flow::On);
        }
        let (client, id) = (self.client.clone(), self.id.clone());
        self.under_way.spawn(async move { Done::Stopped(client.order(&id, "interrupt").await.map(drop)) });
        Ok(Flow::On)
    }
}
