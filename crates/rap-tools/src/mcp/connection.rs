//! Connections to an MCP server: how they begin, and what is done until they end.
//!
//! A connection begins with the handshake of the protocol version 2025-11-25, which nearly every server knows. A server that
//! refuses it is asked again without one, as in the version 2026-07-28.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rap_protocol::Secret;
use rmcp::ServiceError;
use rmcp::model::{ProtocolVersion, ServerCapabilities, SubscriptionFilter};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt, RoleClient, RunningService,
};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::listing::TaskHints;
use super::notices::excerpt;
use super::process::ServerProcess;
use super::running::{Client, RunningCalls};
use super::server::{Server, State};
use super::session::{Session, with_sources};
use super::{McpSource, http};

/// Time in which a server has to start and be initialised. A package may have to be downloaded first.
pub(super) const START_WITHIN: Duration = Duration::from_secs(120);
/// Shortest time between two updates of the tools.
const UPDATE_PAUSE: Duration = Duration::from_millis(250);
/// Time that a server which has closed its stdout usually needs to end.
const END_WITHIN: Duration = Duration::from_secs(1);
/// First and longest pause before the bridge subscribes again to list changes of a server without handshake.
const FIRST_LISTEN_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_LISTEN_PAUSE: Duration = Duration::from_secs(60);

pub(super) type Running = RunningService<RoleClient, Client>;

/// Way in which a connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    Handshake,
    WithoutHandshake,
}

impl Start {
    fn version(self) -> ProtocolVersion {
        match self {
            Start::Handshake => ProtocolVersion::LATEST_WITH_INITIALIZE,
            Start::WithoutHandshake => ProtocolVersion::LATEST,
        }
    }

    pub(super) fn mode(self) -> ClientLifecycleMode {
        match self {
            Start::Handshake => ClientLifecycleMode::Initialize,
            Start::WithoutHandshake => {
                ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::LATEST] }
            }
        }
    }
}

/// A connection that was made, with what was collected from its messages.
pub(super) struct Connected {
    running: Running,
    calls: Arc<RunningCalls>,
    hints: Arc<TaskHints>,
}

impl Connected {
    /// Returns the session of all users.
    pub(super) fn session(&self, server: &Server) -> Session {
        Session {
            server: server.config().name.clone(),
            peer: self.running.peer().clone(),
            calls: Arc::clone(&self.calls),
            ended: self.calls.ended.clone(),
            token: None,
            user: None,
        }
    }

    pub(super) fn hints(&self) -> &TaskHints {
        &self.hints
    }
}

/// Reason why a process that is a server has ended, or is not used any more.
enum Ending {
    /// It refused this beginning of the connection.
    Refused(String),
    Ended(String),
}

impl Server {
    /// Connects, and serves until the connection ends. Returns why it ended.
    pub(super) async fn connect(self: &Arc<Self>, starts: &Semaphore) -> String {
        match &self.config().source {
            McpSource::Command(command) => {
                let mut first_refusal = None;
                for start in self.ways_to_start() {
                    match self.run_process(command, starts, start).await {
                        Ending::Ended(why) => return why,
                        Ending::Refused(why) => first_refusal = first_refusal.or(Some(why)),
                    }
                }
                first_refusal.unwrap_or_default()
            }
            McpSource::Url(url) => {
                let started = starts.acquire().await;
                let bearer = self.config().bearer.clone().map(Secret::new);
                let connected = self.connect_to(url, bearer.as_ref()).await;
                drop(started);
                let ended = match connected {
                    Ok(connected) => self.serve(connected).await,
                    Err(error) => Err(error),
                };
                match ended {
                    Ok(why) => why,
                    Err(NotConnected::SignIn(challenge)) if bearer.is_none() => {
                        self.let_users_sign_in(challenge).await
                    }
                    Err(error) => error.to_string(),
                }
            }
        }
    }

    /// Returns the two ways to start a connection, first the one that was successful the last time.
    fn ways_to_start(&self) -> [Start; 2] {
        match self.has_no_handshake.load(Ordering::Relaxed) {
            false => [Start::Handshake, Start::WithoutHandshake],
            true => [Start::WithoutHandshake, Start::Handshake],
        }
    }

    fn remember(&self, start: Start) {
        self.has_no_handshake.store(start == Start::WithoutHandshake, Ordering::Relaxed);
    }

    /// Returns the client's side of a new session.
    fn client(&self, start: Start) -> Client {
        Client { server: self.config().name.clone(), calls: Arc::default(), version: start.version() }
    }

    /// Starts a process, and serves until it ends.
    async fn run_process(self: &Arc<Self>, command: &[String], starts: &Semaphore, start: Start) -> Ending {
        let started = starts.acquire().await;
        let hints = Arc::new(TaskHints::default());
        let environment = self.environment().iter().cloned();
        let spawned = ServerProcess::start(&self.config().name, command, environment, Arc::clone(&hints));
        let (mut process, pipes) = match spawned {
            Ok(spawned) => spawned,
            Err(error) => return Ending::Ended(format!("cannot be started: {error}")),
        };
        let client = self.client(start);
        let calls = Arc::clone(&client.calls);
        let running = client.serve_with_lifecycle(pipes, start.mode());
        let running = tokio::select! {
            running = timeout(START_WITHIN, running) => running,
            ended = process.ended() => return Ending::Ended(format!("ended before it was initialised: {ended}")),
        };
        let ending = match running {
            Err(_) => Ending::Ended(format!("was not initialised within {START_WITHIN:?}")),
            Ok(Err(error)) if is_refusal(&error) => {
                Ending::Refused(format!("was not initialised: {}", described(&error)))
            }
            Ok(Err(error)) => match timeout(END_WITHIN, process.ended()).await {
                Ok(ended) => Ending::Ended(format!("ended before it was initialised: {ended}")),
                Err(_) => Ending::Ended(format!("was not initialised: {}", described(&error))),
            },
            Ok(Ok(running)) => {
                drop(started);
                self.remember(start);
                let why = tokio::select! {
                    why = self.serve(Connected { running, calls, hints }) => {
                        match timeout(END_WITHIN, process.ended()).await {
                            Ok(ended) => format!("ended: {ended}"),
                            Err(_) => why.unwrap_or_else(|error| error.to_string()),
                        }
                    }
                    ended = process.ended() => format!("ended: {ended}"),
                };
                Ending::Ended(why)
            }
        };
        process.stop().await;
        ending
    }

    /// Connects to a server with a URL.
    pub(super) async fn connect_to(
        &self,
        url: &str,
        token: Option<&Secret>,
    ) -> Result<Connected, NotConnected> {
        let mut first_refusal = None;
        for start in self.ways_to_start() {
            let hints = Arc::new(TaskHints::default());
            let client = self.client(start);
            let calls = Arc::clone(&client.calls);
            let connecting = http::connect(client, start, url, token.map(Secret::expose), &hints);
            match timeout(START_WITHIN, connecting).await {
                Err(_) => return Err(NotConnected::TooLate),
                Ok(Ok(running)) => {
                    self.remember(start);
                    return Ok(Connected { running, calls, hints });
                }
                Ok(Err(error)) => match error.auth_challenge() {
                    Some(challenge) => return Err(NotConnected::SignIn(challenge.to_owned())),
                    None if is_refusal(&error) => {
                        first_refusal.get_or_insert(described(&error));
                    }
                    None => return Err(NotConnected::Failed(described(&error))),
                },
            }
        }
        Err(NotConnected::Failed(first_refusal.unwrap_or_default()))
    }

    /// Offers the tools of a connection until it ends. Returns why it ended.
    async fn serve(self: &Arc<Self>, connected: Connected) -> Result<String, NotConnected> {
        let session = connected.session(self);
        self.update(&session, connected.hints()).await?;
        tracing::info!(server = self.config().name, "the MCP server is running");
        self.set_state(State::Ready(session.clone()));
        Ok(self.follow(connected, session).await)
    }

    /// Keeps the tools up to date until a session ends. Returns why it ended.
    pub(super) async fn follow(self: &Arc<Self>, connected: Connected, session: Session) -> String {
        let Connected { running, hints, .. } = connected;
        let ended = session.ended.clone();
        // Requests that wait for a response of this session end with an error.
        let _guard = ended.clone().drop_guard();
        let (closed, listening) = (running.waiting(), listen(&session));
        tokio::pin!(closed, listening);
        loop {
            tokio::select! {
                _ = &mut closed => return "closed the connection".into(),
                () = ended.cancelled() => return "could not be reached, or has lost the session".into(),
                never = &mut listening => match never {},
                () = session.calls.list_changed.notified() => {
                    tokio::time::sleep(UPDATE_PAUSE).await;
                    if let Err(error) = self.update(&session, &hints).await {
                        tracing::warn!(server = self.config().name, %error, "the changed tools cannot be used");
                    }
                }
            }
        }
    }
}

/// Reason why there is no connection to a server with a URL.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotConnected {
    #[error("was not initialised within {START_WITHIN:?}")]
    TooLate,
    #[error("was not initialised: {0}")]
    Failed(String),
    #[error("{0}")]
    NoTools(String),
    /// The server wants a sign-in, with this challenge.
    #[error("was not initialised: it refuses the token")]
    SignIn(String),
}

enum Never {}

/// Follows the list changes of a server without handshake, which announces them only to subscribers.
async fn listen(session: &Session) -> Never {
    let mut pause = FIRST_LISTEN_PAUSE;
    let mut is_first = true;
    while let Some(wanted) = wanted(session) {
        match session.peer.listen(wanted).await {
            Ok(mut subscription) => {
                pause = FIRST_LISTEN_PAUSE;
                // The lists may have changed while there was no subscription.
                if !std::mem::replace(&mut is_first, false) {
                    session.calls.list_changed.notify_one();
                }
                while let Ok(Some(_)) = subscription.next().await {
                    session.calls.list_changed.notify_one();
                }
            }
            Err(ServiceError::McpError(error)) => {
                tracing::info!(server = session.server, %error, "the MCP server does not announce list changes");
                break;
            }
            Err(error) => {
                tracing::info!(server = session.server, %error, "list changes of the MCP server cannot be followed");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_LISTEN_PAUSE);
    }
    std::future::pending().await
}

/// Returns the changes to subscribe to. `None` if the server announces them without a subscription, or has none.
fn wanted(session: &Session) -> Option<SubscriptionFilter> {
    let info = session.peer.peer_info()?;
    if info.protocol_version.has_initialize() {
        return None;
    }
    let ServerCapabilities { tools, resources, prompts, .. } = &info.capabilities;
    let mut wanted = SubscriptionFilter::new();
    wanted.tools_list_changed = tools.as_ref().and_then(|has| has.list_changed).filter(|changes| *changes);
    wanted.resources_list_changed =
        resources.as_ref().and_then(|has| has.list_changed).filter(|changes| *changes);
    wanted.prompts_list_changed =
        prompts.as_ref().and_then(|has| has.list_changed).filter(|changes| *changes);
    (wanted != SubscriptionFilter::new()).then_some(wanted)
}

/// Returns true if a server has refused this way of beginning a connection, so that it may support the other one.
fn is_refusal(error: &ClientInitializeError) -> bool {
    matches!(error, ClientInitializeError::JsonRpcError(_))
}

/// Returns the reason why a connection could not be initialised.
fn described(error: &ClientInitializeError) -> String {
    excerpt(&with_sources(error))
}
