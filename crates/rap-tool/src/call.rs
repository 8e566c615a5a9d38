//! [`Call`]: the handler's view of the call that it runs.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use rap_io::secret_box::Key;
use rap_protocol::{AuthUrl, CallId, ThreadId, TraceContext, UserId, limits};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::auth::Caller;
use crate::engine::{Answered, CHOICE_PATH, CONSENT_PATH, Engine, Offered, Run};
use crate::error::Error;
use crate::journal::questions::Answer;
use crate::journal::{CallSeq, StoredCall};
use crate::output::{ENVELOPE_BYTES, json_len};
use crate::rules::{Ignored, Input, QuestionName, UserMessage};
use crate::scrub::{Scrub, Scrubber};

/// Maximum number of [`Call::choose`] questions of one call.
const MAX_QUESTIONS: u32 = 100;

/// The call that a handler runs.
///
/// Gives access to the thread, the user and the server's shared state, reports progress, and asks the user. Clones
/// refer to the same call.
#[derive(Clone)]
pub struct Call {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Arc<Engine>,
    run: Arc<Run>,
    seq: CallSeq,
    id: CallId,
    thread: Thread,
    offered: Arc<Offered>,
    ancestors: Box<[ThreadId]>,
    user_id: Option<UserId>,
    trace: Option<TraceContext>,
    identity: [u8; 32],
    /// The last note of [`Call::save`].
    saved: Mutex<Option<Value>>,
}

/// The consent that a user gave; see [`Call::authorize`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consent {
    parameters: BTreeMap<String, String>,
}

impl Consent {
    /// Returns a query parameter of the redirect that the user's browser followed, such as `code`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }
}

/// A conversation thread of one caller.
///
/// Two values are equal if they have the same caller and the same thread id.
#[derive(Clone)]
pub struct Thread {
    id: ThreadId,
    caller: Caller,
    secret: Key,
    key: OnceLock<Box<str>>,
}

impl Thread {
    pub(crate) fn new(id: ThreadId, caller: Caller, secret: Key) -> Self {
        Thread { id, caller, secret, key: OnceLock::new() }
    }

    /// Returns the id that the runtime gave to the thread.
    ///
    /// The id is untrusted input: do not put it into a path, a query or a command. Use [`Thread::key`] for that.
    pub fn id(&self) -> &ThreadId {
        &self.id
    }

    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns a key of 32 hexadecimal digits that identifies this thread of this caller.
    ///
    /// Two callers that use the same thread id get different keys. The key is safe in a file name. Use it to name
    /// the data that you keep for the thread.
    pub fn key(&self) -> &str {
        self.key.get_or_init(|| {
            let mac = self.secret.mac(&[b"thread", self.caller.bytes(), self.id.as_str().as_bytes()]);
            mac[..16].iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
        })
    }
}

impl PartialEq for Thread {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Thread {}

impl fmt::Debug for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Thread({:?})", self.id)
    }
}

impl Call {
    pub(crate) fn new(
        engine: Arc<Engine>,
        run: Arc<Run>,
        thread: Thread,
        offered: Arc<Offered>,
        stored: &mut StoredCall,
    ) -> Self {
        let inner = Inner {
            engine,
            run,
            seq: stored.seq,
            id: stored.id.clone(),
            thread,
            offered,
            ancestors: std::mem::take(&mut stored.ancestors).into(),
            user_id: stored.user_id.take(),
            trace: stored.trace,
            identity: stored.identity,
            saved: Mutex::new(stored.cursor.clone().filter(|_| !stored.confirmed)),
        };
        Call { inner: Arc::new(inner) }
    }

    /// Returns the id that the runtime gave to the call. It is untrusted input.
    pub fn id(&self) -> &CallId {
        &self.inner.id
    }

    /// Returns the name of the tool that was called.
    pub fn tool(&self) -> &str {
        self.inner.offered.tool.name()
    }

    /// Returns the thread that made the call.
    pub fn thread(&self) -> &Thread {
        &self.inner.thread
    }

    /// Returns the ancestors of the thread, root first. Empty for a root thread.
    pub fn ancestors(&self) -> &[ThreadId] {
        &self.inner.ancestors
    }

    /// Returns the end user on whose behalf the call is made, or `None` if the runtime did not name one.
    pub fn user_id(&self) -> Option<&UserId> {
        self.inner.user_id.as_ref()
    }

    /// Returns the `traceparent` of the invocation (W3C Trace Context), to be passed on to other services. `None` if
    /// the runtime sent none. The server itself sends it back with the callbacks of the call.
    pub fn traceparent(&self) -> Option<String> {
        self.inner.trace.map(|trace| trace.to_string())
    }

    /// Returns the time of the server's clock, which is virtual in a [`TestRuntime`](crate::TestRuntime).
    pub fn now(&self) -> SystemTime {
        let since_epoch = u64::try_from(self.inner.engine.now().0).unwrap_or_default();
        SystemTime::UNIX_EPOCH + Duration::from_millis(since_epoch)
    }

    /// Resolves when the result is no longer wanted: the call was cancelled or took too long, its thread was closed, or no
    /// runtime accepts the events of the subscription.
    ///
    /// The handler then has [`Limits::cancel_grace`](crate::Limits::cancel_grace), 5 seconds by default, to return.
    /// After that its future is dropped. A value that it returns within that time after a cancellation, such as the output
    /// so far, is the result of the call; after an error, or if it does not return, the result is `Error: cancelled`.
    pub async fn cancelled(&self) {
        self.inner.run.cancelled().await;
    }

    /// Returns true if the result is no longer wanted; see [`Call::cancelled`].
    pub fn is_cancelled(&self) -> bool {
        self.inner.run.is_cancelled()
    }

    /// Stores a note about the progress of the call, such as the id of a job that was started elsewhere. Returns when
    /// it is on disk. A later note replaces it.
    ///
    /// If the server stops during the call of a [restartable](crate::Tool::restartable) tool, the handler is called
    /// again and finds the note with [`Call::saved`], so that it can continue instead of doing its work twice. For a
    /// subscription, use
    /// [`Subscription::save`](crate::Subscription::save) instead.
    pub async fn save(&self, note: impl Serialize) -> Result<(), Error> {
        let note = serde_json::to_value(note)?;
        let text = note.to_string();
        *self.inner.saved.lock().expect("bug: nothing panics under a lock") = Some(note);
        Box::pin(self.inner.engine.save_cursor(self.inner.thread.caller(), self.inner.seq, text)).await;
        Ok(())
    }

    /// Returns the last note of [`Call::save`], also one from before a restart. `None` if there is none.
    pub fn saved<T: DeserializeOwned>(&self) -> Result<Option<T>, Error> {
        let note = self.inner.saved.lock().expect("bug: nothing panics under a lock").clone();
        Ok(note.map(serde_json::from_value).transpose()?)
    }

    /// Returns the value of this type that was passed to [`ToolServer::state`](crate::ToolServer::state).
    ///
    /// # Panics
    ///
    /// Panics if there is none. The call then ends with a general error result, and the panic message goes to the
    /// log.
    pub fn state<S: Send + Sync + 'static>(&self) -> &S {
        let state = self.inner.engine.states.get(&TypeId::of::<S>()).and_then(|state| state.downcast_ref());
        state.unwrap_or_else(|| {
            panic!("no state of type {} was passed to ToolServer::state", std::any::type_name::<S>())
        })
    }

    /// Asks the user to choose, and waits for the answer. Returns the index of the choice, which is `default` if the
    /// user dismisses the question.
    ///
    /// Questions and answers survive a restart: if a restartable tool asks its questions in the same order again, it
    /// gets the stored answers and the user is not asked twice.
    pub async fn choose<C: Into<String>>(
        &self,
        prompt: impl Into<String>,
        choices: impl IntoIterator<Item = C>,
        default: usize,
    ) -> Result<usize, Error> {
        let choices: Vec<String> = choices.into_iter().map(Into::into).collect();
        let (prompt, choices) = self.scrubbed((prompt.into(), choices)).await;
        check_choice(&prompt, &choices, default)?;
        let number = self.inner.run.choices_asked.fetch_add(1, Ordering::Relaxed);
        if number >= MAX_QUESTIONS {
            return Err(Error::new("this call has asked the user too many questions"));
        }
        let engine = &self.inner.engine;
        let token = engine.question_token(CHOICE_PATH, &self.inner.identity, number);
        let (question, path) = (engine.question_name(CHOICE_PATH, &token), self.question_path(&token));
        let response_url = engine.choice_url(&path);
        let message = UserMessage::Choice { question, prompt, choices, default, response_url };
        match Box::pin(self.ask(question, message, None)).await? {
            Some(Answered { answer: Answer::Selected(index), .. }) => Ok(index),
            _ => Err(Error::new("the user could not be asked")),
        }
    }

    /// Returns the URL on this server to use as the `redirect_uri` of an authorisation.
    ///
    /// [`Call::authorize`] returns when the user's browser has visited it.
    pub fn redirect_url(&self) -> String {
        self.inner.engine.consent_url(&self.consent_path(0))
    }

    /// Returns the last segment of [`Call::redirect_url`], which names the call and cannot be guessed. A call may ask for
    /// several sign-ins, each of which has a number.
    pub(crate) fn consent_path(&self, number: u32) -> String {
        self.question_path(&self.consent_token(number))
    }

    pub(crate) fn pkce_verifier(&self) -> String {
        self.inner.engine.pkce_verifier(&self.inner.identity)
    }

    /// Returns the owner of the tokens that the call may use: its user, or its session if it has none.
    pub(crate) fn token_owner(&self) -> String {
        match (self.user_id(), self.ancestors().first()) {
            (Some(user), _) => format!("user {}", user.as_str()),
            (None, Some(root)) => format!("session {}", root.as_str()),
            (None, None) => format!("session {}", self.thread().id().as_str()),
        }
    }

    fn question_path(&self, token: &str) -> String {
        self.inner.engine.question_path(self.inner.thread.caller(), token)
    }

    fn consent_token(&self, number: u32) -> String {
        self.inner.engine.question_token(CONSENT_PATH, &self.inner.identity, number)
    }

    /// Asks the user to authorise the tool at `url`, and waits until their browser is redirected to
    /// [`Call::redirect_url`].
    ///
    /// Returns an error if the user refuses, or if no answer arrives within
    /// [`Limits::authorize_within`](crate::Limits::authorize_within), 1 hour by default.
    ///
    /// The consent survives a restart: a restartable tool gets it without asking the user again.
    pub async fn authorize(&self, url: impl Into<String>) -> Result<Consent, Error> {
        self.authorize_numbered(url.into(), 0).await.map(|(consent, _)| consent)
    }

    /// Asks for the consent of this number. The second value is true if it was already asked for, before a restart.
    pub(crate) async fn authorize_numbered(
        &self,
        url: String,
        number: u32,
    ) -> Result<(Consent, bool), Error> {
        let auth_url = AuthUrl::new(url)?;
        let engine = &self.inner.engine;
        let question = engine.question_name(CONSENT_PATH, &self.consent_token(number));
        let message = UserMessage::Authorize { question, auth_url };
        let within = engine.limits.authorize_within;
        match Box::pin(self.ask(question, message, Some(within))).await? {
            Some(Answered { answer: Answer::Consented(parameters), asked_before }) => {
                match parameters.get("error") {
                    Some(error) => Err(Error::new(format!("the user did not authorise this: {error}"))),
                    None => Ok((Consent { parameters }, asked_before)),
                }
            }
            Some(_) => Err(Error::new("the user could not be asked to authorise this")),
            None => {
                let minutes = within.as_secs().div_ceil(60);
                Err(Error::new(format!(
                    "the user did not authorise this within {minutes} minutes; ask them first"
                )))
            }
        }
    }

    /// Shows `content` to the user while the call runs. Later content of the same view type replaces earlier content.
    /// The model never sees it.
    pub async fn view(&self, view_type: impl Into<String>, content: impl Serialize) -> Result<(), Error> {
        let content = self.scrubbed(serde_json::to_value(content)?).await;
        let view_type = view_type.into();
        let length = view_type.chars().count();
        if !(1..=limits::NAME_CHARS).contains(&length) || view_type.chars().any(char::is_control) {
            return Err(Error::new("a view type has 1 to 128 characters and no control characters"));
        }
        if json_len(&content) + ENVELOPE_BYTES > limits::BODY_BYTES {
            return Err(Error::new("the content of a view is too large"));
        }
        loop {
            let changed = self.inner.run.changed.notified();
            let message = UserMessage::View { view_type: view_type.clone(), content: content.clone() };
            match Box::pin(self.commit(Input::UserMessage(message), None)).await {
                Ok(()) => return Ok(()),
                Err(Ignored::Full) => changed.await,
                Err(_) => return Err(Error::new("the call has ended")),
            }
        }
    }

    /// Shows the progress of the call: a view of type `progress` with a fraction from 0 to 1 and a text.
    pub async fn progress(&self, fraction: f64, text: impl Into<String>) -> Result<(), Error> {
        let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 0.0 };
        self.view("progress", json!({"fraction": fraction, "text": text.into()})).await
    }

    /// Returns the scrubber of the tool's output; `None` if the tool has turned scrubbing off.
    pub(crate) fn scrubber(&self) -> Option<Arc<Scrubber>> {
        self.inner.offered.tool.scrubs().then(|| Arc::clone(&self.inner.engine.scrubber))
    }

    /// Scrubs output of the handler. Boxed to keep the future of an idle subscription small.
    pub(crate) async fn scrubbed<T: Scrub>(&self, output: T) -> T {
        match self.scrubber() {
            Some(scrubber) => Box::pin(scrubber.scrub(output)).await,
            None => output,
        }
    }

    /// Applies an input to the call; see [`Engine::commit`].
    pub(crate) async fn commit(&self, input: Input, cursor: Option<String>) -> Result<(), Ignored> {
        self.inner.engine.commit(self.inner.thread.caller(), self.inner.seq, input, cursor).await
    }

    /// Asks a question; see [`Engine::ask`].
    async fn ask(
        &self,
        question: QuestionName,
        message: UserMessage,
        within: Option<Duration>,
    ) -> Result<Option<Answered>, Error> {
        let Inner { engine, run, seq, thread, .. } = &*self.inner;
        engine.ask(thread.caller(), *seq, run, question, message, within).await
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.inner.engine
    }

    pub(crate) fn run(&self) -> &Run {
        &self.inner.run
    }

    pub(crate) fn seq(&self) -> CallSeq {
        self.inner.seq
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({:?} of {:?})", self.inner.id, self.inner.thread)
    }
}

/// Rejects a question that every runtime would refuse. Otherwise the handler would wait for an answer in vain.
fn check_choice(prompt: &str, choices: &[String], default: usize) -> Result<(), Error> {
    let wrong = if choices.is_empty() || choices.len() > limits::CHOICES {
        format!("a question has 1 to {} choices", limits::CHOICES)
    } else if default >= choices.len() {
        "the default of a question must be one of its choices".into()
    } else if prompt.len() > limits::PROMPT_BYTES {
        format!("a prompt has at most {} bytes", limits::PROMPT_BYTES)
    } else if choices.iter().any(|choice| choice.len() > limits::CHOICE_BYTES) {
        format!("a choice has at most {} bytes", limits::CHOICE_BYTES)
    } else {
        return Ok(());
    };
    Err(Error::new(wrong))
}
