//! `rap chat`: talk to an agent, and see what it does.
//!
//! What is shown comes from the event stream alone, which goes on where it was after the runtime has restarted.

mod console;
mod streamed;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use http::HeaderValue;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use self::console::{Console, Input};
use self::streamed::{Piece, Streamed};
use super::inbox::{meant, numbered};
use super::{Connection, known};
use crate::age::{self, span};
use crate::api::{Asked, CallNews, CallState, Entry, Item, Question, Status, Waiting};
use crate::client::{Client, Event, Follower, News, idempotency_key};
use crate::rest::Rest;
use crate::table::{BOLD, DIM, RED, YELLOW, one_line, styled};
use crate::transcript::{Line, Transcript};

/// How much of an older conversation is shown.
const REMEMBERED: usize = 12;
/// A second ^C within this time leaves.
const TWICE: Duration = Duration::from_secs(2);
/// When it is said how long a call has been running, in seconds; every hour after that.
const MILESTONES: [u64; 8] = [5, 10, 30, 60, 120, 300, 600, 1800];

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
    let mut console = Console::open()?;
    if console.is_terminal() {
        let keys = "^C stops the agent, ^C twice or ^D leaves";
        let hello = format!("thread {}, agent {}; {keys}", styled(BOLD, &thread.id), thread.agent);
        console.show(&hello)?;
    }
    Conversation {
        follower: Follower::new(client.clone(), &thread.id, 0),
        client,
        id: thread.id,
        console,
        transcript: Transcript::default(),
        streamed: Streamed::default(),
        past: Some(VecDeque::new()),
        rest: Rest::default(),
        questions: VecDeque::new(),
        running: BTreeMap::new(),
        outgoing: VecDeque::new(),
        said: Vec::new(),
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
    console: Console,
    transcript: Transcript,
    streamed: Streamed,
    /// What was there already, until all of it has been told.
    past: Option<VecDeque<Line>>,
    rest: Rest,
    questions: VecDeque<Question>,
    /// Open calls, and how many milestones of each were told.
    running: BTreeMap<String, (Waiting, usize)>,
    /// What the runtime has not taken yet.
    outgoing: VecDeque<(String, HeaderValue)>,
    /// What was said here, and is not to be shown again.
    said: Vec<String>,
    interrupted: Option<Instant>,
    /// Whether the input is at its end.
    ended: bool,
    why: Option<String>,
}

/// Whether the chat goes on.
#[derive(PartialEq)]
enum Flow {
    On,
    Leave,
}

impl Conversation {
    async fn run(mut self) -> anyhow::Result<()> {
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        let mut interrupts = signal(SignalKind::interrupt())?;
        loop {
            let reads = self.wants_input();
            let flow = tokio::select! {
                news = self.follower.next() => self.learn(news?)?,
                input = self.console.next(), if reads => {
                    let flow = self.act(input).await?;
                    if flow == Flow::On {
                        self.console.read_on();
                    }
                    flow
                }
                _ = interrupts.recv() => self.stop().await?,
                _ = tick.tick() => {
                    self.say_outgoing().await?;
                    self.tell_elapsed()?;
                    Flow::On
                }
            };
            if flow == Flow::Leave {
                return self.leave();
            }
            if self.ended && self.outgoing.is_empty() {
                if self.rest.is_reached() {
                    return self.leave();
                }
                self.nobody_answers()?;
            }
        }
    }

    /// A person can speak at any time; the lines of a pipe wait for their turn.
    fn wants_input(&self) -> bool {
        let choice = self.questions.iter().any(|question| matches!(question.asked, Asked::Choice { .. }));
        let turn = self.outgoing.is_empty() && (self.rest.is_reached() || choice);
        !self.ended && (self.console.is_terminal() || turn)
    }

    fn leave(mut self) -> anyhow::Result<()> {
        if self.console.is_terminal() {
            let hint = format!("the agent goes on without you; come back with: rap chat {}", self.id);
            self.console.show(&styled(DIM, &hint))?;
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
        let event = match news {
            News::Event(event) => event,
            News::Lost => {
                self.note("the connection is lost; connecting again")?;
                return Ok(Flow::On);
            }
            News::Back => {
                self.rest.start_over();
                self.questions.clear();
                self.running.clear();
                self.streamed.drop_shown();
                self.note("connected again")?;
                return Ok(Flow::On);
            }
        };
        self.rest.see(&event);
        match event {
            Event::Entry(entry) => self.show_entry(&entry)?,
            Event::Delta(delta) if self.console.is_terminal() => {
                let width = self.console.width().saturating_sub(8);
                let pieces = self.streamed.push(&delta, width);
                self.show_pieces(pieces)?;
            }
            Event::Call(news) => self.note_call(news),
            Event::Question(question) => self.ask(question)?,
            Event::Notice(text) => self.note(&one_line(&text))?,
            Event::Status(news) => {
                self.show_past()?;
                if news.status != Status::NeedsYou {
                    self.questions.clear();
                }
                if news.why.is_some() && news.why != self.why {
                    self.show_why(news.status, news.why.as_deref().unwrap_or_default())?;
                }
                self.why = news.why;
                if news.status == Status::Closed {
                    self.note("the thread is closed")?;
                    return Ok(Flow::Leave);
                }
            }
            Event::Delta(_) | Event::View(_) | Event::End => {}
        }
        Ok(Flow::On)
    }

    fn show_why(&mut self, status: Status, why: &str) -> anyhow::Result<()> {
        let word = if status == Status::Failed { "failed" } else { "paused" };
        let resume = format!("rap threads resume {}", self.id);
        let text = format!("{word}: {}; let it go on with: {resume}", one_line(why));
        self.console.show(&styled(RED, &text))
    }

    fn show_entry(&mut self, entry: &Entry) -> anyhow::Result<()> {
        let mut lines = self.transcript.lines(entry);
        if let Some(past) = &mut self.past {
            past.extend(lines);
            return Ok(());
        }
        match &entry.item {
            // On a terminal it stands there already.
            Item::User { text, from: None } if self.console.is_terminal() => {
                if let Some(place) = self.said.iter().position(|said| said == text) {
                    self.said.remove(place);
                    return Ok(());
                }
            }
            Item::Assistant { text, .. } if self.console.is_terminal() => {
                let pieces = self.streamed.finish(text);
                self.show_pieces(pieces)?;
                lines.retain(|line| line.who != "agent");
            }
            _ => {}
        }
        for line in lines {
            self.console.show(&line.render())?;
        }
        Ok(())
    }

    fn show_pieces(&mut self, pieces: Vec<Piece>) -> anyhow::Result<()> {
        for piece in pieces {
            match piece {
                Piece::First(what) => self.console.show(&Line { who: "agent", what }.render())?,
                Piece::More(what) => self.console.show(&format!("        {what}"))?,
                Piece::Void => self.note("the agent begins its answer again")?,
            }
        }
        Ok(())
    }

    /// Everything before has been told: a person sees the last of it, a pipe only what is new.
    fn show_past(&mut self) -> anyhow::Result<()> {
        let past = self.past.take().unwrap_or_default();
        if self.console.is_terminal() {
            for line in past.iter().skip(past.len().saturating_sub(REMEMBERED)) {
                self.console.show(&line.render())?;
            }
        }
        Ok(())
    }

    fn note_call(&mut self, news: CallNews) {
        let id = news.call.call_id.clone();
        match news.state {
            CallState::Open => {
                self.running.insert(id, (news.call, 0));
            }
            CallState::Settled => {
                self.running.remove(&id);
                self.questions.retain(|question| question.call_id != id);
            }
        }
    }

    fn tell_elapsed(&mut self) -> anyhow::Result<()> {
        let now = age::now();
        let mut due = Vec::new();
        for (call, told) in self.running.values_mut() {
            let elapsed = now.since(call.since).as_secs();
            let passed = MILESTONES.iter().filter(|milestone| elapsed >= **milestone).count();
            let passed = passed + usize::try_from(elapsed / 3600).unwrap_or(usize::MAX);
            if passed > *told {
                *told = passed;
                due.push(format!(
                    "… {} ({}) has been running for {}",
                    call.tool,
                    call.call_id,
                    span(now.since(call.since))
                ));
            }
        }
        due.iter().try_for_each(|text| self.note(text))
    }

    fn ask(&mut self, question: Question) -> anyhow::Result<()> {
        self.show_past()?;
        let tool = one_line(&question.tool);
        match &question.asked {
            Asked::Choice { prompt, choices, default } => {
                self.console.show(&styled(YELLOW, &format!("{tool} asks: {}", one_line(prompt))))?;
                for (index, choice) in numbered(choices).iter().enumerate() {
                    let usual = if index == *default { " (default)" } else { "" };
                    self.console.show(&format!("  {}{usual}", one_line(choice)))?;
                }
                self.note("answer with a number; anything else is said to the agent")?;
            }
            Asked::SignIn { auth_url } => {
                self.console.show(&styled(
                    YELLOW,
                    &format!("{tool} wants you to sign in: open {}", one_line(auth_url)),
                ))?;
            }
        }
        self.questions.push_back(question);
        Ok(())
    }

    fn note(&mut self, text: &str) -> anyhow::Result<()> {
        self.console.show(&styled(DIM, &format!("        {text}")))
    }

    async fn act(&mut self, input: Input) -> anyhow::Result<Flow> {
        match input {
            Input::Line(line) => self.take_line(line.trim()).await?,
            Input::Interrupt => return self.stop().await,
            Input::End if self.console.is_terminal() => return Ok(Flow::Leave),
            Input::End => self.ended = true,
        }
        Ok(Flow::On)
    }

    async fn take_line(&mut self, line: &str) -> anyhow::Result<()> {
        if line.is_empty() {
            return Ok(());
        }
        if self.answer(line).await? {
            return Ok(());
        }
        self.rest.expect(line);
        self.said.push(line.to_owned());
        self.outgoing.push_back((line.to_owned(), idempotency_key()));
        self.say_outgoing().await
    }

    /// Takes a line as the answer to the oldest question, if it is one.
    async fn answer(&mut self, line: &str) -> anyhow::Result<bool> {
        let open = self.questions.iter().enumerate().find_map(|(place, question)| match &question.asked {
            Asked::Choice { choices, .. } => Some((place, meant(choices, line)?)),
            Asked::SignIn { .. } => None,
        });
        let Some((place, selected)) = open else { return Ok(false) };
        let call = self.questions[place].call_id.clone();
        match self.client.choose(&self.id, &call, Some(selected)).await {
            Ok(_) => {
                self.questions.remove(place);
                self.rest.wait_for_status();
            }
            Err(error) => self.note(&format!("not answered: {error}"))?,
        }
        Ok(true)
    }

    /// Says what was not taken yet. The runtime may be away; then it is said when it is back.
    async fn say_outgoing(&mut self) -> anyhow::Result<()> {
        while let Some((text, key)) = self.outgoing.front().cloned() {
            match self.client.say(&self.id, &json!({"text": text}), &key).await {
                Ok(_) => {}
                Err(error) if error.is_passing() => return Ok(()),
                Err(error) => {
                    self.rest.forget(&text);
                    self.note(&format!("not said: {error}"))?;
                }
            }
            self.outgoing.pop_front();
        }
        Ok(())
    }

    /// The first ^C stops the agent, a second one soon after leaves.
    async fn stop(&mut self) -> anyhow::Result<Flow> {
        if self.interrupted.is_some_and(|at| at.elapsed() < TWICE) {
            return Ok(Flow::Leave);
        }
        self.interrupted = Some(Instant::now());
        if self.rest.is_reached() {
            self.note("the agent does nothing; ^C again or ^D leaves")?;
            return Ok(Flow::On);
        }
        match self.client.order(&self.id, "interrupt").await {
            Ok(_) => self.note("stopped; ^C again or ^D leaves")?,
            Err(error) => self.note(&format!("not stopped: {error}"))?,
        }
        Ok(Flow::On)
    }
}
