//! `rap chat`: an interactive conversation with an agent.
//!
//! Everything shown comes from the event stream, which resumes at the last entry after a restart of the runtime.

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
use rap_api::client::{Backoff, Client, Error, Follower, IdempotencyKey, Update};
use rap_api::{
    Answer, CallState, CreateThread, Question, QuestionKind, SendMessage, Status, StatusEvent, ThreadEvent,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use self::console::Console;
use self::editor::Input;
use self::view::View;
use super::inbox::{numbered, parse_choice};
use super::{Connection, with_suggestion};
use crate::idle::IdleDetector;
use crate::table::{DIM, one_line, styled};

/// A second ^C within this time exits.
const TWICE: Duration = Duration::from_secs(2);
/// Interval at which the durations of open calls are updated and unsent messages are retried.
const TICK: Duration = Duration::from_millis(500);
/// Maximum number of messages that wait for the runtime.
const MAX_UNSENT: usize = 100;
/// Time that exiting waits for requests in progress.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of `rap chat`.
#[derive(Args)]
#[command(
    after_help = "If stdin is not a terminal, each line is sent when the agent is idle, or answers its question.\n\
                        Example: echo 'say hello' | rap chat"
)]
pub struct Chat {
    /// Id of the thread [default: a new thread].
    pub thread: Option<String>,
    /// Name of the agent of a new thread [default: the first one in the configuration].
    #[arg(long, conflicts_with = "thread")]
    pub agent: Option<String>,
    /// Runtime to talk to.
    #[command(flatten)]
    pub connection: Connection,
}

/// Runs the command until the user exits or the thread is closed.
pub async fn run(chat: Chat) -> anyhow::Result<()> {
    let client = chat.connection.client()?;
    let thread = match &chat.thread {
        Some(id) => with_suggestion(&client, id, client.thread(id).await).await?,
        None => {
            let new = CreateThread { agent: chat.agent, ..CreateThread::default() };
            client.create_thread(&new).await?
        }
    };
    if thread.status == Status::Closed {
        bail!("thread {} is closed; start a new one with: rap chat", thread.id);
    }
    let mut view = View::new(Console::open()?);
    view.greet(&thread.id, &thread.agent)?;
    if client.is_scripted(&thread.agent).await {
        view.warn_scripted()?;
    }
    Conversation {
        follower: client.follow(&thread.id, 0),
        client,
        id: thread.id,
        view,
        idle: IdleDetector::default(),
        questions: VecDeque::new(),
        unsent: VecDeque::new(),
        sending: false,
        send_at: Instant::now(),
        backoff: Backoff::default(),
        requests: JoinSet::new(),
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
    idle: IdleDetector,
    questions: VecDeque<Question>,
    /// Messages that the runtime has not accepted yet, with their idempotency keys.
    unsent: VecDeque<(String, IdempotencyKey)>,
    /// True while the first of them is being sent.
    sending: bool,
    /// Time of the next attempt to send it.
    send_at: Instant,
    backoff: Backoff,
    /// Requests in progress. Input and events are handled meanwhile.
    requests: JoinSet<Response>,
    /// Time of the last ^C.
    interrupted: Option<Instant>,
    /// True if the input has ended.
    ended: bool,
    /// Last reason why the thread failed or is paused.
    why: Option<String>,
}

/// Response to a request.
enum Response {
    Sent(Result<(), Error>),
    Answered(Box<Question>, Result<(), Error>),
    Interrupted(Result<(), Error>),
}

#[derive(PartialEq)]
enum Flow {
    Continue,
    Exit,
}

impl Conversation {
    async fn run(mut self) -> anyhow::Result<()> {
        let mut tick = tokio::time::interval(TICK);
        let mut interrupts = signal(SignalKind::interrupt())?;
        loop {
            let reads = self.wants_input();
            let flow = tokio::select! {
                update = self.follower.next() => self.on_update(update?)?,
                input = self.view.console.next(), if reads => self.on_input(input?)?,
                Some(response) = self.requests.join_next() => {
                    self.on_response(response?)?;
                    Flow::Continue
                }
                _ = interrupts.recv() => self.interrupt()?,
                _ = tick.tick() => {
                    self.send_next();
                    Flow::Continue
                }
            };
            if flow == Flow::Exit {
                return self.exit().await;
            }
            self.view.refresh()?;
            if self.ended && self.unsent.is_empty() {
                if self.idle.is_idle() {
                    return self.exit().await;
                }
                self.fail_if_question_is_open()?;
            }
        }
    }

    /// A terminal is always read. Lines of a pipe are read one at a time, when the agent is idle or asks something.
    fn wants_input(&self) -> bool {
        let choice =
            self.questions.iter().any(|question| matches!(question.kind, QuestionKind::Choice { .. }));
        let ready = self.unsent.is_empty() && (self.idle.is_idle() || choice);
        !self.ended && (self.view.console.is_terminal() || ready)
    }

    /// Waits for requests in progress, and reports messages that were not sent.
    async fn exit(mut self) -> anyhow::Result<()> {
        let finish = async {
            while let Some(response) = self.requests.join_next().await {
                self.on_response(response?)?;
            }
            anyhow::Ok(())
        };
        if let Ok(outcome) = tokio::time::timeout(EXIT_TIMEOUT, finish).await {
            outcome?;
        }
        for (text, _) in &self.unsent {
            self.view.warn(&format!("not sent, because the runtime is down: {}", one_line(text)))?;
        }
        if self.view.console.is_terminal() {
            let hint = format!("the agent keeps running; come back with: rap chat {}", self.id);
            self.view.print(&styled(DIM, &hint))?;
        } else if self.idle.status() == Some(Status::Failed) {
            bail!("the agent failed: {}", self.why.unwrap_or_default());
        }
        Ok(())
    }

    /// Fails if the agent waits for an answer: after the end of a pipe, none can come.
    fn fail_if_question_is_open(&self) -> anyhow::Result<()> {
        for Question { call_id, kind, .. } in &self.questions {
            if let QuestionKind::Choice { prompt, choices, .. } = kind {
                let choices = numbered(choices).join(", ");
                let command = format!("rap inbox answer {} {call_id} CHOICE", self.id);
                bail!("the agent waits for an answer: {prompt} {choices}\nanswer with: {command}");
            }
        }
        Ok(())
    }

    fn on_update(&mut self, update: Update) -> anyhow::Result<Flow> {
        if let Some(message) = update.message() {
            self.view.note(&message)?;
        }
        let event = match update {
            Update::Event(event) => event,
            Update::Skipped(_) => return Ok(Flow::Continue),
            Update::Disconnected => {
                self.view.drop_answer();
                return Ok(Flow::Continue);
            }
            Update::Reconnected => {
                self.idle.reconnected();
                self.questions.clear();
                self.view.reconnected();
                self.send_at = Instant::now();
                return Ok(Flow::Continue);
            }
        };
        self.idle.observe(&event);
        match event {
            ThreadEvent::Entry(entry) => self.view.entry(&entry)?,
            ThreadEvent::Delta(delta) => self.view.delta(&delta),
            ThreadEvent::Call(update) => {
                if update.state == CallState::Settled {
                    self.questions.retain(|question| question.call_id != update.call.call_id);
                }
                self.view.call(update);
            }
            ThreadEvent::Question(question) => {
                self.view.question(&question)?;
                self.questions.push_back(question);
            }
            ThreadEvent::Notice(notice) => {
                self.view.drop_answer();
                self.view.note(&one_line(&notice.text))?;
            }
            ThreadEvent::Status(update) => return self.on_status(update),
            ThreadEvent::View(_) | ThreadEvent::End(_) => {}
        }
        Ok(Flow::Continue)
    }

    fn on_status(&mut self, update: StatusEvent) -> anyhow::Result<Flow> {
        self.view.status(&update)?;
        if update.status != Status::NeedsYou {
            self.questions.clear();
        }
        if let Some(why) = update.why.as_ref().filter(|_| update.why != self.why) {
            self.view.why(&self.id, update.status, why)?;
        }
        self.why = update.why;
        if update.status == Status::Closed {
            self.view.note("the thread is closed")?;
            return Ok(Flow::Exit);
        }
        Ok(Flow::Continue)
    }

    fn on_input(&mut self, input: Input) -> anyhow::Result<Flow> {
        match input {
            Input::Line(line) => self.take_line(line.trim())?,
            Input::Interrupt => return self.interrupt(),
            Input::End if self.view.console.is_terminal() => return Ok(Flow::Exit),
            Input::End => self.ended = true,
        }
        Ok(Flow::Continue)
    }

    fn take_line(&mut self, line: &str) -> anyhow::Result<()> {
        if line.is_empty() || self.answer(line)? {
            return Ok(());
        }
        if self.unsent.len() >= MAX_UNSENT {
            return self.view.warn("not sent: too many messages wait for the runtime");
        }
        self.view.message(line)?;
        self.idle.expect(line);
        self.unsent.push_back((line.to_owned(), IdempotencyKey::random()));
        self.send_next();
        Ok(())
    }

    /// Answers the first question that the line is a valid choice for. Returns false if there is none.
    fn answer(&mut self, line: &str) -> anyhow::Result<bool> {
        let open = self.questions.iter().enumerate().find_map(|(index, question)| match &question.kind {
            QuestionKind::Choice { choices, .. } => {
                let selected = parse_choice(choices, line)?;
                Some((index, selected, choices[selected].clone()))
            }
            QuestionKind::SignIn { .. } | QuestionKind::Unknown => None,
        });
        let Some((index, selected, choice)) = open else { return Ok(false) };
        let Some(question) = self.questions.remove(index) else { return Ok(false) };
        self.view.answered(&choice)?;
        self.idle.forget_status();
        let (client, id) = (self.client.clone(), self.id.clone());
        self.requests.spawn(async move {
            let outcome = client.answer(&id, &question.call_id, &Answer::select(selected as u32)).await;
            Response::Answered(Box::new(question), outcome.map(drop))
        });
        Ok(true)
    }

    /// Sends the first unsent message, unless one is being sent or the next attempt is not due yet.
    fn send_next(&mut self) {
        let may = !self.sending && Instant::now() >= self.send_at;
        let Some((text, key)) = self.unsent.front().cloned().filter(|_| may) else { return };
        self.sending = true;
        let (client, id) = (self.client.clone(), self.id.clone());
        self.requests.spawn(async move {
            Response::Sent(client.send_message(&id, &SendMessage::new(text), &key).await.map(drop))
        });
    }

    fn on_response(&mut self, response: Response) -> anyhow::Result<()> {
        match response {
            Response::Sent(outcome) => {
                self.sending = false;
                if outcome.as_ref().is_err_and(Error::is_transient) {
                    self.send_at = Instant::now() + self.backoff.next_delay();
                    return Ok(());
                }
                self.backoff.reset();
                self.follower.connect_now();
                let sent = self.unsent.pop_front();
                if let (Err(error), Some((text, _))) = (outcome, sent) {
                    self.idle.cancel_expected(&text);
                    self.view.message_refused(&text, &error.to_string())?;
                }
                self.send_next();
            }
            Response::Answered(question, Err(error)) => {
                if error.is_transient() {
                    self.questions.push_front(*question);
                }
                self.view.warn(&format!("the answer was not accepted: {error}"))?;
            }
            Response::Interrupted(Ok(())) => self.view.note("interrupted; press ^C again or ^D to exit")?,
            Response::Interrupted(Err(error)) => self.view.warn(&format!("not interrupted: {error}"))?,
            Response::Answered(_, Ok(())) => {}
        }
        Ok(())
    }

    /// Handles ^C: the first one interrupts the agent, a second one within [`TWICE`] exits.
    fn interrupt(&mut self) -> anyhow::Result<Flow> {
        if self.interrupted.is_some_and(|at| at.elapsed() < TWICE) {
            return Ok(Flow::Exit);
        }
        self.interrupted = Some(Instant::now());
        if self.idle.is_idle() {
            self.view.note("the agent is idle; press ^C again or ^D to exit")?;
            return Ok(Flow::Continue);
        }
        let (client, id) = (self.client.clone(), self.id.clone());
        self.requests.spawn(async move { Response::Interrupted(client.interrupt(&id).await.map(drop)) });
        Ok(Flow::Continue)
    }
}
