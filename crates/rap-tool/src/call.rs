//! What a handler knows about its call.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use rap_io::secret_box::Key;
use rap_protocol::{AuthUrl, CallId, ThreadId, UserId, limits};
use serde::Serialize;
use serde_json::json;

use crate::auth::Caller;
use crate::engine::{CHOICE_PATH, CONSENT_PATH, Engine, Run};
use crate::error::Error;
use crate::journal::questions::Answer;
use crate::journal::{Seq, StoredCall};
use crate::output::{ENVELOPE_BYTES, counted};
use crate::rules::{Aside, Ignored, Input};

/// How many choices one call may ask for.
const QUESTIONS: u32 = 100;

/// One call of a tool, in the hands of its handler. Clones are the same call.
#[derive(Clone)]
pub struct Call {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Arc<Engine>,
    run: Arc<Run>,
    seq: Seq,
    id: CallId,
    thread: Thread,
    tool: Arc<str>,
    ancestors: Vec<ThreadId>,
    user_id: Option<UserId>,
    identity: [u8; 32],
}

/// What a user's consent brought along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consent {
    parameters: BTreeMap<String, String>,
}

impl Consent {
    /// A parameter of the URL that the user's browser came back to, such as `code`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }
}

/// A conversation thread, as a tool server sees it.
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

    /// The id that the runtime gave it. It is untrusted: never put it into a path, a query or a command.
    pub fn id(&self) -> &ThreadId {
        &self.id
    }

    /// 32 hexadecimal digits that stand for this thread of this caller. Two callers that use the same id have
    /// different keys. It is safe in a file name, and the right name for what belongs to the thread.
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
        tool: Arc<str>,
        stored: &mut StoredCall,
    ) -> Self {
        let inner = Inner {
            engine,
            run,
            seq: stored.seq,
            id: stored.id.clone(),
            thread,
            tool,
            ancestors: std::mem::take(&mut stored.ancestors),
            user_id: stored.user_id.take(),
            identity: stored.identity,
        };
        Call { inner: Arc::new(inner) }
    }

    /// The id of the call.
    pub fn id(&self) -> &CallId {
        &self.inner.id
    }

    /// The name of the tool.
    pub fn tool(&self) -> &str {
        &self.inner.tool
    }

    /// The thread that it belongs to.
    pub fn thread(&self) -> &Thread {
        &self.inner.thread
    }

    /// The ancestors of the thread, root first; none for a root thread.
    pub fn ancestors(&self) -> &[ThreadId] {
        &self.inner.ancestors
    }

    /// The end user on whose behalf the call is made, where the runtime says so.
    pub fn user_id(&self) -> Option<&UserId> {
        self.inner.user_id.as_ref()
    }

    /// Resolves when nobody waits for the result any more: the call was cancelled, or its thread closed. The
    /// handler then has a grace time, 5 seconds by default, before it is dropped where it stands.
    pub async fn cancelled(&self) {
        self.inner.run.stopped().await;
    }

    /// Whether [`Call::cancelled`] has come.
    pub fn is_cancelled(&self) -> bool {
        self.inner.run.is_stopped()
    }

    /// What was given to [`ToolServer::state`](crate::ToolServer::state) with this type.
    ///
    /// # Panics
    ///
    /// If there is none, which the call's result then hides from the model and the log tells.
    pub fn state<S: Send + Sync + 'static>(&self) -> &S {
        let state = self.inner.engine.states.get(&TypeId::of::<S>()).and_then(|state| state.downcast_ref());
        state.unwrap_or_else(|| {
            panic!("no state of type {} was given to the server", std::any::type_name::<S>())
        })
    }

    /// Asks the user to choose, and waits for the answer: the index of the choice, which is `default` if the user
    /// dismisses the question.
    ///
    /// The answer survives a restart: a restartable tool that asks its questions in the same order gets it
    /// without asking again.
    pub async fn choose<C: Into<String>>(
        &self,
        prompt: impl Into<String>,
        choices: impl IntoIterator<Item = C>,
        default: usize,
    ) -> Result<usize, Error> {
        let choices: Vec<String> = choices.into_iter().map(Into::into).collect();
        let prompt = prompt.into();
        check_choice(&prompt, &choices, default)?;
        let number = self.inner.run.asked.fetch_add(1, Ordering::Relaxed);
        if number >= QUESTIONS {
            return Err(Error::new("this call has asked the user too many questions"));
        }
        let engine = &self.inner.engine;
        let token = engine.question_token(CHOICE_PATH, &self.inner.identity, number);
        let (question, response_url) =
            (engine.question_named(CHOICE_PATH, &token), engine.choice_url(&token));
        let aside = Aside::Choice { question, prompt, choices, default, response_url };
        match Box::pin(engine.ask(self.inner.seq, &self.inner.run, question, aside, None)).await? {
            Some(Answer::Selected(index)) => Ok(index),
            _ => Err(Error::new("the user could not be asked")),
        }
    }

    /// Where the user's browser has to arrive in the end, so that [`Call::authorize`] knows of the consent. It is
    /// a URL on this server, to be used as the `redirect_uri` of an authorisation.
    pub fn redirect_url(&self) -> String {
        self.inner.engine.consent_url(&self.consent_token())
    }

    fn consent_token(&self) -> String {
        self.inner.engine.question_token(CONSENT_PATH, &self.inner.identity, 0)
    }

    /// Sends the user to a URL to authorise the tool, and waits until they arrive at [`Call::redirect_url`].
    /// It is an error if they refuse, or do not come within
    /// [`Limits::authorize_within`](crate::Limits::authorize_within), an hour by default.
    ///
    /// The consent survives a restart: a restartable tool gets it without asking again.
    pub async fn authorize(&self, url: impl Into<String>) -> Result<Consent, Error> {
        let auth_url = AuthUrl::new(url)?;
        let engine = &self.inner.engine;
        let question = engine.question_named(CONSENT_PATH, &self.consent_token());
        let aside = Aside::Authorise { question, auth_url };
        let within = engine.limits.authorize_within;
        match Box::pin(engine.ask(self.inner.seq, &self.inner.run, question, aside, Some(within))).await? {
            Some(Answer::Consented(parameters)) => match parameters.get("error") {
                Some(error) => Err(Error::new(format!("the user did not authorise this: {error}"))),
                None => Ok(Consent { parameters }),
            },
            Some(_) => Err(Error::new("the user could not be asked to authorise this")),
            None => {
                let minutes = within.as_secs().div_ceil(60);
                Err(Error::new(format!(
                    "the user did not authorise this within {minutes} minutes; ask them first"
                )))
            }
        }
    }

    /// Shows something to people while the call goes on. The latest content of each view type counts; the model
    /// never sees it.
    pub async fn view(&self, view_type: impl Into<String>, content: impl Serialize) -> Result<(), Error> {
        let (view_type, content) = (view_type.into(), serde_json::to_value(content)?);
        let length = view_type.chars().count();
        if !(1..=limits::NAME_CHARS).contains(&length) || view_type.chars().any(char::is_control) {
            return Err(Error::new("a view type has 1 to 128 characters and no control characters"));
        }
        if counted(&content) + ENVELOPE_BYTES > limits::BODY_BYTES {
            return Err(Error::new("the content of a view is too large"));
        }
        loop {
            let news = self.inner.run.news.notified();
            let aside = Aside::View { view_type: view_type.clone(), content: content.clone() };
            match Box::pin(self.inner.engine.commit(self.inner.seq, Input::Aside(aside), None)).await {
                Ok(()) => return Ok(()),
                Err(Ignored::Full) => news.await,
                Err(_) => return Err(Error::new("the call is over")),
            }
        }
    }

    /// Shows how far the call has come: a view of type `progress` with a fraction from 0 to 1 and a text.
    pub async fn progress(&self, fraction: f64, text: impl Into<String>) -> Result<(), Error> {
        let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 0.0 };
        self.view("progress", json!({"fraction": fraction, "text": text.into()})).await
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.inner.engine
    }

    pub(crate) fn run(&self) -> &Run {
        &self.inner.run
    }

    pub(crate) fn seq(&self) -> Seq {
        self.inner.seq
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({:?} of {:?})", self.inner.id, self.inner.thread)
    }
}

/// A question that no runtime could take is the author's mistake; better to say so than to wait for its answer.
fn check_choice(prompt: &str, choices: &[String], default: usize) -> Result<(), Error> {
    let wrong = if choices.is_empty() || choices.len() > limits::CHOICES {
        format!("a question has 1 to {} choices", limits::CHOICES)
    } else if default >= choices.len() {
        "the default of a question is one of its choices".into()
    } else if prompt.len() > limits::PROMPT_BYTES {
        format!("a prompt has at most {} bytes", limits::PROMPT_BYTES)
    } else if choices.iter().any(|choice| choice.len() > limits::CHOICE_BYTES) {
        format!("a choice has at most {} bytes", limits::CHOICE_BYTES)
    } else {
        return Ok(());
    };
    Err(Error::new(wrong))
}
