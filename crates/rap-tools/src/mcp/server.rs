//! One MCP server: its connection, which is made again whenever it ends, and its tool server.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use rap_tool::{Call, Error, Mounted, ToolServer};
use rmcp::model::{ClientRequest, ServerResult};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::McpServer;
use super::connection::NotConnected;
use super::listing::{Listing, TaskHints, UserTools};
use super::notices::excerpt;
use super::session::{Failure, Session};
use super::users::Users;

/// Time in which a server has to list its tools.
const LIST_WITHIN: Duration = Duration::from_secs(60);
/// Time that a call waits for a server that is being started.
const CALL_WAITS: Duration = Duration::from_secs(30);
/// First and longest pause before a server is started again. The pause doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Time after which a server that ran counts as healthy, so that the next pause is the first one again.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of times that a request is sent, if its server says each time that it has not handled it.
const ATTEMPTS: usize = 4;

/// State of the connection.
#[derive(Clone)]
pub(super) enum State {
    /// The first connection is being made.
    Starting,
    Ready(Session),
    /// Each user has to sign in.
    SignIn,
    /// There is no connection, for this reason. It is made again.
    Down(String),
}

/// Stored state of a server.
#[derive(Default, Serialize, Deserialize)]
struct Stored {
    versions: Vec<String>,
    listing: Listing,
    /// Tools of the users, if they have to sign in.
    #[serde(default)]
    user_tools: UserTools,
}

/// URLs under which a server is reached.
pub(super) struct Urls {
    pub(super) public_url: String,
    /// URL to which browsers are sent after a sign-in; `None` if it is below the public one.
    pub(super) consent_url: Option<String>,
}

/// One MCP server.
pub(super) struct Server {
    config: McpServer,
    /// Environment of its process.
    environment: Vec<(String, String)>,
    data: PathBuf,
    urls: Urls,
    state: watch::Sender<State>,
    mounted: Mutex<Option<Mounted>>,
    listing: Mutex<Listing>,
    /// Tools of the users, if they have to sign in. Its lock is held while the offered tools are replaced.
    user_tools: tokio::sync::Mutex<UserTools>,
    /// True if the server knows only the protocol version without handshake.
    pub(super) has_no_handshake: AtomicBool,
    pub(super) users: Users,
    stop: CancellationToken,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    pub(super) fn new(
        config: McpServer,
        environment: &[(String, String)],
        data: PathBuf,
        urls: Urls,
        stop: CancellationToken,
    ) -> Arc<Server> {
        let own = config.environment.iter().map(|(name, value)| (name.clone(), value.clone()));
        let environment = environment.iter().cloned().chain(own).collect();
        Arc::new(Server {
            config,
            environment,
            data,
            urls,
            state: watch::Sender::new(State::Starting),
            mounted: Mutex::default(),
            listing: Mutex::default(),
            user_tools: tokio::sync::Mutex::default(),
            has_no_handshake: AtomicBool::default(),
            users: Users::default(),
            stop,
        })
    }

    pub(super) fn config(&self) -> &McpServer {
        &self.config
    }

    /// Returns the environment of its process.
    pub(super) fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    pub(super) fn set_state(&self, state: State) {
        self.state.send_replace(state);
    }

    /// Returns a token that is cancelled when the bridge stops.
    pub(super) fn stopped(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Sends a request for a call, and waits for the answer. If the server says that it did not handle the request, because
    /// it does not know the session any more or wants the user to sign in, it is sent again in another session.
    pub(super) async fn request(
        self: &Arc<Self>,
        call: &Call,
        request: ClientRequest,
    ) -> Result<ServerResult, Failure> {
        let mut session = self.session(call).await?;
        let mut answered = session.request(call, request.clone()).await;
        for _ in 1..ATTEMPTS {
            session = match answered {
                Err(Failure::SignIn(challenge)) => self.signed_in_again(call, &session, &challenge).await?,
                Err(Failure::LostSession) => {
                    session.ended.cancel();
                    if session.token.is_some() {
                        self.user_session(call).await?
                    } else {
                        self.session(call).await?
                    }
                }
                answered => return answered,
            };
            answered = session.request(call, request.clone()).await;
        }
        answered
    }

    /// Returns the session for a call that was cancelled. It waits for nothing.
    pub(super) async fn current_session(self: &Arc<Self>, call: &Call) -> Result<Session, Failure> {
        let state = self.state.borrow().clone();
        match state {
            State::Ready(session) => Ok(session),
            State::SignIn => self.user_session(call).await,
            State::Starting | State::Down(_) => Err(Failure::Ended),
        }
    }

    /// Returns the session for a call. Waits for a server that is being started.
    pub(super) async fn session(self: &Arc<Self>, call: &Call) -> Result<Session, Failure> {
        let mut state = self.state.subscribe();
        let must_sign_in = matches!(*state.borrow(), State::SignIn);
        if must_sign_in {
            return self.user_session(call).await;
        }
        let ready = async {
            let found = state
                .wait_for(|state| matches!(state, State::Ready(session) if !session.ended.is_cancelled()));
            match found.await.as_deref() {
                Ok(State::Ready(session)) => Some(session.clone()),
                _ => None,
            }
        };
        let session = tokio::select! {
            session = timeout(CALL_WAITS, ready) => session.ok().flatten(),
            () = call.cancelled() => return Err(Failure::Cancelled),
        };
        session.ok_or_else(|| {
            let why = match &*self.state.borrow() {
                State::Down(why) => why.clone(),
                _ => "it is being started".into(),
            };
            Failure::Unusable(self.unusable(&why))
        })
    }

    /// Returns the endpoints, as soon as they are there. `discovers` is true for a request for the toolset, which waits
    /// for a server that is being started, and fails with the reason if it could not be started.
    pub(super) async fn router(&self, discovers: bool) -> Result<Router, String> {
        let mut state = self.state.subscribe();
        if discovers {
            // The sender lives as long as this server.
            state.wait_for(|state| !matches!(state, State::Starting)).await.ok();
        }
        let was_ready = !lock(&self.listing).is_unknown();
        let down = match &*state.borrow() {
            State::Down(why) => Some(why.clone()),
            State::Starting => Some("it is being started".to_owned()),
            State::Ready(_) | State::SignIn => None,
        };
        let router = lock(&self.mounted).as_ref().map(Mounted::router);
        match (router, down) {
            (Some(router), None) => Ok(router),
            (Some(router), Some(_)) if was_ready || !discovers => Ok(router),
            (_, down) => Err(down.unwrap_or_else(|| "it has no tools".into())),
        }
    }

    /// Mounts the tool server with the tools that the last process stored, so that the calls of that process continue.
    pub(super) async fn resume(self: &Arc<Self>) {
        let Some(stored) = self.stored() else { return };
        *self.user_tools.lock().await = stored.user_tools;
        if let Err(why) = self.mount(&stored.listing, stored.versions).await {
            tracing::warn!(server = self.config.name, why, "the stored list of tools cannot be used");
        }
    }

    /// Connects again and again, until the bridge stops. `starts` bounds the number of servers that start at once.
    pub(super) async fn keep_connected(self: Arc<Self>, starts: Arc<Semaphore>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let began = Instant::now();
            let ended = tokio::select! {
                biased;
                () = self.stop.cancelled() => None,
                why = self.connect(&starts) => Some(why),
            };
            let Some(why) = ended else { break };
            if began.elapsed() >= HEALTHY_AFTER {
                pause = FIRST_PAUSE;
            }
            tracing::warn!(server = self.config.name, again_in = ?pause, "the MCP server {why}");
            self.state.send_replace(State::Down(why));
            tokio::select! {
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
        }
        let mounted = lock(&self.mounted).take();
        if let Some(mounted) = mounted {
            mounted.shut_down().await;
        }
    }

    /// Offers the stored list of tools, or one to sign in with, until the bridge stops.
    pub(super) async fn let_users_sign_in(self: &Arc<Self>, challenge: String) -> String {
        let is_mounted = lock(&self.mounted).is_some();
        let stored = self.stored().map(|stored| stored.listing).filter(Listing::may_name_users);
        let offered = match (is_mounted, stored) {
            (false, _) => self.mount(&Listing::default(), Vec::new()).await,
            (true, Some(listing)) => {
                let users = self.user_tools.lock().await;
                self.offer(&listing.without_names(), &users).await
            }
            (true, None) => Ok(()),
        };
        if let Err(why) = offered {
            return why;
        }
        tracing::info!(server = self.config.name, "the MCP server asks each user to sign in");
        self.note_challenge(&challenge);
        self.state.send_replace(State::SignIn);
        std::future::pending().await
    }

    pub(super) fn unusable(&self, why: &str) -> Error {
        Error::new(format!(
            "the MCP server {} cannot be used: {why}; the call was not made",
            self.config.name
        ))
    }

    /// Asks the server for its tools, and offers them.
    pub(super) async fn update(
        self: &Arc<Self>,
        session: &Session,
        hints: &TaskHints,
    ) -> Result<(), NotConnected> {
        let failed = |why: String| NotConnected::NoTools(why);
        let listing = match timeout(LIST_WITHIN, Listing::read(&session.peer, hints)).await {
            Ok(Ok(listing)) => listing,
            Ok(Err(error)) => {
                let said = excerpt(&error.to_string());
                return Err(match Failure::from(error) {
                    Failure::SignIn(challenge) => NotConnected::SignIn(challenge),
                    _ => failed(format!("did not list its tools: {said}")),
                });
            }
            Err(_) => return Err(failed(format!("did not list its tools within {LIST_WITHIN:?}"))),
        };
        let mut users = self.user_tools.lock().await;
        let listing = match &session.user {
            None => listing,
            // Everybody may list the tools of this server. They are known from the session of all users.
            Some(_) if !matches!(*self.state.borrow(), State::SignIn) => return Ok(()),
            Some(user) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                users.common(user, listing, now)
            }
        };
        let is_known = *lock(&self.listing) == listing && lock(&self.mounted).is_some();
        if !is_known {
            self.offer(&listing, &users).await.map_err(failed)?;
            *lock(&self.listing) = listing;
        } else if session.user.is_some() {
            self.remember_tools(&listing, &users);
        }
        Ok(())
    }

    async fn offer(self: &Arc<Self>, listing: &Listing, users: &UserTools) -> Result<(), String> {
        let replaced = {
            let mounted = lock(&self.mounted);
            mounted.as_ref().map(|mounted| mounted.replace_tools(listing.tools(self)))
        };
        match replaced {
            Some(replaced) => replaced.map_err(|error| error.to_string())?,
            None => self.mount(listing, Vec::new()).await?,
        }
        self.remember_tools(listing, users);
        Ok(())
    }

    /// Stores the tools for the next start.
    fn remember_tools(&self, listing: &Listing, users: &UserTools) {
        let versions = lock(&self.mounted).as_ref().map(Mounted::versions).unwrap_or_default();
        let stored = Stored { versions, listing: listing.clone(), user_tools: users.clone() };
        if let Err(error) = self.store(&stored) {
            tracing::warn!(server = self.config.name, %error, "the list of tools cannot be stored");
        }
    }

    async fn mount(self: &Arc<Self>, listing: &Listing, versions: Vec<String>) -> Result<(), String> {
        let tools = listing.tools(self);
        if tools.is_empty() {
            return Err("has no tools".into());
        }
        let mut server = ToolServer::new(&self.config.name).with_environment().accepts(versions);
        server = server.data(&self.data).public_url(&self.urls.public_url);
        if let Some(url) = &self.urls.consent_url {
            server = server.consent_url(url);
        }
        if let Some(instructions) = &listing.instructions {
            server = server.description(excerpt(instructions));
        }
        let server = tools.into_iter().fold(server, ToolServer::offer);
        let mounted = server.mount().await.map_err(|error| error.to_string())?;
        *lock(&self.mounted) = Some(mounted);
        Ok(())
    }

    fn stored(&self) -> Option<Stored> {
        let text = fs::read(self.data.join("tools.json")).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Replaces the file as a whole, so that it is never half written.
    fn store(&self, stored: &Stored) -> io::Result<()> {
        let (new, path) = (self.data.join("tools.json.new"), self.data.join("tools.json"));
        fs::create_dir_all(&self.data)?;
        fs::write(&new, serde_json::to_vec(stored)?)?;
        fs::rename(new, path)
    }
}
