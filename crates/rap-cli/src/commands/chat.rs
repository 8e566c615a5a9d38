//! `rap chat`: an interactive conversation with an agent.
//!
//! Everything shown comes from the event stream, which resumes at the last entry after a restart of the runtime.

mod command;
mod console;
mod editor;
mod image;
mod keys;
mod questions;
mod screen;
mod streamed;
mod terminal;
mod tool_views;
mod view;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use clap::Args;
use rap_api::client::{Backoff, Client, Error, Follower, IdempotencyKey, Update};
use rap_api::{
    Answer, CONTENT_ITEMS, CallEventKind, CreateThread, Question, SendMessage, Status, StatusEvent, Thread,
    ThreadEvent, Threads,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use self::command::Command;
use self::console::Console;
use self::editor::Input;
use self::image::Attachment;
use self::questions::{Meaning, Questions};
use self::view::View;
use super::inbox::numbered;
use super::{Connection, with_suggestion};
use crate::idle::IdleDetector;
use crate::status_text;
use crate::table::{DIM, one_line, styled};

/// A second ^C within this time exits.
const TWICE: Duration = Duration::from_secs(2);
/// Interval at which the durations of open calls are updated and unsent messages are retried.
const TICK: Duration = Duration::from_millis(500);
/// Maximum number of messages that wait for the runtime.
const MAX_UNSENT: usize = 100;
/// Number of threads among which `--last` finds the one that changed last.
const LAST_AMONG: usize = 1000;
/// Time that exiting waits for requests in progress.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of `rap chat`.
#[derive(Args)]
#[command(
    after_help = "A question that the agent or a tool asks stays open, and on the screen, until it is answered. The next line \
                        answers it if it is y or n (for an approval), the number of a choice or its text. A number, y or n \
                        that matches no choice is rejected and not sent. Every other line is a message to the agent, after \
                        which the question is still open. /help lists the commands of a chat, such as /image FILE, /usage \
                        and /say TEXT.\n\n\
                        If stdin is not a terminal, one line at a time is read: as the next message when the agent is idle, or as the \
                        answer when it asks a question.\n\
                        Example: echo 'say hello' | rap chat"
)]
pub struct Chat {
    /// Id of the thread [default: a new thread].
    pub thread: Option<String>,
    /// Continue the thread that changed last, of those that are not closed.
    #[arg(long, conflicts_with = "thread")]
    pub last: bool,
    /// Name of the agent of a new thread [default: the first one in the configuration].
    #[arg(long, conflicts_with_all = ["thread", "last"])]
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
        None if chat.last => last_thread(&client).await?,
        None => {
            let new = CreateThread { agent: chat.agent, ..CreateThread::default() };
            client.create_thread(&new).await?
        }
    };
    if thread.status == Status::Closed {
        bail!("thread {} is closed; start a new one with: rap chat", thread.id);
    }
    let mut view = View::new(Console::open()?);
    view.greet(&thread)?;
    if client.is_scripted(&thread.agent).await {
        view.warn_scripted()?;
    }
    Conversation {
        follower: client.follow(&thread.id, 0),
        client,
        id: thread.id,
        view,
        idle: IdleDetector::default(),
        questions: Questions::default(),
        attachments: Vec::new(),
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

/// Returns the root thread that changed last, of those that are not closed.
async fn last_thread(client: &Client) -> anyhow::Result<Thread> {
    let filters = [("order", "newest"), ("roots", "true")];
    let threads = client.list::<Threads>(&filters, Some(LAST_AMONG)).await?.threads;
    let open = threads.into_iter().filter(|thread| thread.status != Status::Closed);
    open.max_by_key(|thread| thread.updated_at)
        .ok_or_else(|| anyhow!("there is no open thread to continue; start one with: rap chat"))
}

struct Conversation {
    client: Client,
    id: String,
    follower: Follower,
    view: View,
    idle: IdleDetector,
    questions: Questions,
    /// Images that go with the next message.
    attachments: Vec<Attachment>,
    /// Messages that the runtime has not accepted yet, with their idempotency keys.
    unsent: VecDeque<(SendMessage, IdempotencyKey)>,
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
    Resumed(Result<(), Error>),
    Usage(Box<Result<Thread, Error>>),
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
            self.view.refresh(&self.questions)?;
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
        let choice = self.questions.choices().next().is_some();
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
        for (message, _) in &self.unsent {
            let text = one_line(&message.text);
            self.view.warn(&format!("not sent, because the runtime is down: {text}"))?;
        }
        if self.view.console.is_terminal() {
            let hint = format!("the agent keeps running; continue with: rap chat {}", self.id);
            self.view.print(&styled(DIM, &hint))?;
        } else if self.idle.status() == Some(Status::Failed) {
            bail!("the agent failed: {}", self.why.unwrap_or_default());
        }
        Ok(())
    }

    /// Fails if the agent waits for an answer: after the end of a pipe, none can come.
    fn fail_if_question_is_open(&self) -> anyhow::Result<()> {
        match self.questions.choices().next() {
            None => Ok(()),
            Some((question, prompt, choices)) => {
                let choices = numbered(choices).join(", ");
                let command = format!("rap inbox answer {} {} CHOICE", self.id, question.call_id);
                bail!("the agent waits for an answer: {prompt} {choices}\nanswer with: {command}");
            }
        }
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
                if update.state == CallEventKind::Settled {
                    self.questions.settled(&update.call.call_id);
                }
                self.view.call(update);
            }
            ThreadEvent::Question(question) => {
                self.view.question(&question)?;
                self.questions.add(question);
            }
            ThreadEvent::Notice(notice) => {
                self.view.drop_answer();
                self.view.note(&one_line(&notice.text))?;
            }
            ThreadEvent::Status(update) => return self.on_status(update),
            ThreadEvent::View(shown) => self.view.tool_view(&shown),
            ThreadEvent::Child(child) => self.view.child(&child)?,
            ThreadEvent::End(_) => {}
        }
        Ok(Flow::Continue)
    }

    fn on_status(&mut self, update: StatusEvent) -> anyhow::Result<Flow> {
        self.view.status(&update)?;
        // While the model is asked, or cannot be, a question stays open. In these states there is none.
        if matches!(update.status, Status::Idle | Status::Waiting | Status::Closed) {
            self.questions.clear();
        }
        if update.why.is_some() && update.why != self.why {
            self.view.why(&self.id, &update)?;
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
            Input::Line(line) => return self.take_line(line.trim()),
            Input::Interrupt => return self.interrupt(),
            Input::End if self.view.console.is_terminal() => return Ok(Flow::Exit),
            Input::End => self.ended = true,
        }
        Ok(Flow::Continue)
    }

    fn take_line(&mut self, line: &str) -> anyhow::Result<Flow> {
        if line.is_empty() {
            return Ok(Flow::Continue);
        }
        match command::parse(line) {
            Some(command) => return self.obey(command),
            None if self.view.console.is_terminal() => {
                let (path, rest) = command::first_path(line);
                if rest.is_empty() && image::is_image_path(&path) {
                    self.attach(&path, "")?;
                    return Ok(Flow::Continue);
                }
            }
            None => {}
        }
        match self.questions.meaning_of(line) {
            Meaning::Answer { selected, choice } => self.answer(Some(selected), &choice)?,
            Meaning::NoSuchChoice(why) => self.view.warn(&why)?,
            Meaning::Message => self.say(line)?,
        }
        Ok(Flow::Continue)
    }

    fn obey(&mut self, command: Command<'_>) -> anyhow::Result<Flow> {
        match command {
            Command::Help => command::HELP.lines().try_for_each(|line| self.view.note(line))?,
            Command::Quit => return Ok(Flow::Exit),
            Command::Say("") => self.view.warn("nothing to send; usage: /say TEXT")?,
            Command::Say(text) => self.say(text)?,
            Command::Image { file, text } => self.attach(&file, text)?,
            Command::Skip if self.questions.put_off() => {}
            Command::Skip => self.view.note("there is no other question")?,
            Command::Dismiss if self.questions.choices().next().is_none() => {
                self.view.note("there is no open question")?;
            }
            Command::Dismiss => self.answer(None, "the default")?,
            Command::Unknown(word) => {
                self.view.warn(&format!(
                    "not sent: /{word} is not a command; /help lists them, /say /{word} sends it"
                ))?;
            }
            Command::Resume => {
                let (client, id) = (self.client.clone(), self.id.clone());
                self.requests.spawn(async move { Response::Resumed(client.resume(&id).await.map(drop)) });
            }
            Command::Usage => {
                let (client, id) = (self.client.clone(), self.id.clone());
                self.requests.spawn(async move { Response::Usage(Box::new(client.thread(&id).await)) });
            }
        }
        Ok(Flow::Continue)
    }

    /// Adds an image to the next message, or sends it with a text.
    fn attach(&mut self, path: &str, text: &str) -> anyhow::Result<()> {
        let attachment = match image::read(path) {
            Ok(attachment) => attachment,
            Err(error) => return self.view.warn(&format!("not attached: {error:#}")),
        };
        if self.attachments.len() == CONTENT_ITEMS {
            return self.view.warn(&format!("not attached: a message may have {CONTENT_ITEMS} images"));
        }
        let name = one_line(&attachment.name);
        self.attachments.push(attachment);
        if text.is_empty() {
            return self.view.note(&format!("{name} will be sent with your next message"));
        }
        self.say(text)
    }

    /// Sends a message to the agent, with the images that were attached.
    fn say(&mut self, text: &str) -> anyhow::Result<()> {
        if self.unsent.len() >= MAX_UNSENT {
            return self.view.warn("not sent: too many messages wait for the runtime");
        }
        let attachments = std::mem::take(&mut self.attachments);
        let names: Vec<&str> = attachments.iter().map(|attachment| attachment.name.as_str()).collect();
        self.view.message(text, &names)?;
        self.idle.expect(text);
        let content = attachments.into_iter().map(|attachment| attachment.item).collect();
        let message = SendMessage { content, ..SendMessage::new(text) };
        self.unsent.push_back((message, IdempotencyKey::random()));
        self.send_next();
        Ok(())
    }

    /// Answers the first open question; `None` dismisses it.
    fn answer(&mut self, selected: Option<usize>, choice: &str) -> anyhow::Result<()> {
        let Some(question) = self.questions.take_first() else { return Ok(()) };
        self.view.answered(choice)?;
        self.idle.forget_status();
        let answer = selected.map_or(Answer::dismiss(), |selected| Answer::select(selected as u32));
        let (client, id) = (self.client.clone(), self.id.clone());
        self.requests.spawn(async move {
            let outcome = client.answer(&id, &question.call_id, &answer).await;
            Response::Answered(Box::new(question), outcome.map(drop))
        });
        Ok(())
    }

    /// Sends the first unsent message, unless one is being sent or the next attempt is not due yet.
    fn send_next(&mut self) {
        let may = !self.sending && Instant::now() >= self.send_at;
        let Some((message, key)) = self.unsent.front().cloned().filter(|_| may) else { return };
        self.sending = true;
        let (client, id) = (self.client.clone(), self.id.clone());
        self.requests
            .spawn(async move { Response::Sent(client.send_message(&id, &message, &key).await.map(drop)) });
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
                if let (Err(error), Some((message, _))) = (outcome, sent) {
                    self.idle.cancel_expected(&message.text);
                    self.view.message_refused(&message.text, &error.to_string())?;
                }
                self.send_next();
            }
            Response::Answered(question, Err(error)) => {
                if error.is_transient() {
                    self.questions.put_back(*question);
                }
                self.view.warn(&format!("the answer was not accepted: {error}"))?;
            }
            Response::Interrupted(Ok(())) => self.view.note("interrupted; press ^C again or ^D to exit")?,
            Response::Interrupted(Err(error)) => self.view.warn(&format!("not interrupted: {error}"))?,
            Response::Resumed(Err(error)) => self.view.warn(&format!("not resumed: {error}"))?,
            Response::Usage(outcome) => match *outcome {
                Ok(thread) => self.view.note(&status_text::usage(&thread))?,
                Err(error) => self.view.warn(&format!("the usage cannot be shown: {error}"))?,
            },
            Response::Answered(_, Ok(())) | Response::Resumed(Ok(())) => {}
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
