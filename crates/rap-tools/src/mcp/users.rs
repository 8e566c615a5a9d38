//! Sessions of users who have signed in to an MCP server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rap_protocol::Secret;
use rap_tool::{Call, Error, OauthApp};
use url::Url;

use super::connection::{Connected, NotConnected};
use super::server::Server;
use super::session::{Failure, Session};
use super::{McpSource, sign_in};

/// Number of tokens of a user that a server may refuse during one call.
const SIGN_INS: usize = 3;
/// Maximum number of sessions. Beyond it, those end that were not used for the longest time.
const SESSIONS: usize = 1_000;
/// Time after which a session ends that is not used.
const UNUSED: Duration = Duration::from_secs(60 * 60);

/// The users of a server.
#[derive(Default)]
pub(super) struct Users {
    /// Sessions by their access tokens.
    sessions: Mutex<HashMap<String, KeptSession>>,
    /// The client of the authorization server, once it is known.
    app: tokio::sync::Mutex<Option<OauthApp>>,
    /// The last challenge of the server.
    challenge: Mutex<String>,
}

/// A session, if it was made already. The lock is held while the session is being made.
type SessionCell = Arc<tokio::sync::Mutex<Option<Session>>>;

struct KeptSession {
    cell: SessionCell,
    used: Instant,
}

impl KeptSession {
    /// Returns true if nobody uses the session or waits for it.
    fn is_free(&self) -> bool {
        match self.cell.try_lock() {
            Ok(session) => session.as_ref().is_none_or(|session| session.calls.is_idle()),
            Err(_) => false,
        }
    }

    fn is_over(&self) -> bool {
        let has_ended =
            |session: &Option<Session>| session.as_ref().is_some_and(|session| session.ended.is_cancelled());
        self.cell.try_lock().is_ok_and(|session| has_ended(&session))
    }

    fn end(&self) {
        if let Ok(session) = self.cell.try_lock()
            && let Some(session) = session.as_ref()
        {
            session.ended.cancel();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the owner of the tokens that a call uses: its user, or its session if it has none.
fn owner(call: &Call) -> String {
    let session = call.ancestors().first().unwrap_or_else(|| call.thread().id());
    call.user_id().map_or_else(|| format!("session {session}"), |user| format!("user {}", user.as_str()))
}

impl Users {
    /// Returns the cell of the session with a token, and ends sessions that are not needed any more.
    fn cell(&self, token: &str) -> SessionCell {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|known, held| {
            let is_unused = held.used.elapsed() > UNUSED && held.is_free();
            if is_unused && known != token {
                held.end();
            }
            known == token || !is_unused && !held.is_over()
        });
        if sessions.len() >= SESSIONS && !sessions.contains_key(token) {
            let free = sessions.iter().filter(|(_, held)| held.is_free());
            let oldest = free.min_by_key(|(_, held)| held.used).map(|(token, _)| token.clone());
            if let Some(held) = oldest.and_then(|oldest| sessions.remove(&oldest)) {
                held.end();
            }
        }
        let held = sessions
            .entry(token.to_owned())
            .or_insert_with(|| KeptSession { cell: SessionCell::default(), used: Instant::now() });
        held.used = Instant::now();
        Arc::clone(&held.cell)
    }
}

impl Server {
    /// Returns the client of the authorization server.
    async fn oauth_app(&self, call: &Call, url: &Url) -> Result<OauthApp, Error> {
        let mut app = self.users.app.lock().await;
        if let Some(app) = app.as_ref() {
            return Ok(app.clone());
        }
        let challenge = lock(&self.users.challenge).clone();
        let found = sign_in::app(self.config(), url, &challenge, &call.oauth_redirect_url()).await;
        let found = found.map_err(|why| {
            Error::new(format!("nobody can sign in to the MCP server {}: {why}", self.config().name))
        })?;
        Ok(app.insert(found).clone())
    }

    /// Notes the challenge of a server that asks users to sign in.
    pub(super) fn note_challenge(&self, challenge: &str) {
        *lock(&self.users.challenge) = challenge.to_owned();
    }

    /// Returns the session of the user of a call, who is asked to sign in first if necessary.
    pub(super) async fn user_session(self: &Arc<Self>, call: &Call) -> Result<Session, Failure> {
        let url = self.url().map_err(Failure::NotSignedIn)?;
        for _ in 0..SIGN_INS {
            let app = self.oauth_app(call, &url).await.map_err(Failure::NotSignedIn)?;
            let token = call.access_token(&app).await.map_err(Failure::NotSignedIn)?;
            let cell = self.users.cell(token.expose());
            let mut cell = cell.lock().await;
            if let Some(session) = cell.as_ref().filter(|session| !session.ended.is_cancelled()) {
                return Ok(session.clone());
            }
            let (connected, session) = match self.connect_as(&url, &token, owner(call)).await {
                Ok(connected) => connected,
                Err(NotConnected::SignIn(challenge)) => {
                    drop(cell);
                    self.refused(call, &app, &token, &challenge).await;
                    continue;
                }
                Err(error) => return Err(Failure::Unusable(self.unusable(&error.to_string()))),
            };
            *cell = Some(session.clone());
            let (server, followed) = (Arc::clone(self), session.clone());
            tokio::spawn(async move {
                let stop = server.stopped();
                tokio::select! {
                    _ = server.follow(connected, followed) => {}
                    () = stop.cancelled() => {}
                }
            });
            return Ok(session);
        }
        Err(Failure::SignIn(String::new()))
    }

    /// Connects with the token of a user, and reads the list of tools.
    async fn connect_as(
        self: &Arc<Self>,
        url: &Url,
        token: &Secret,
        user: String,
    ) -> Result<(Connected, Session), NotConnected> {
        let connected = self.connect_to(url.as_str(), Some(token)).await?;
        let session = Session { token: Some(token.clone()), user: Some(user), ..connected.session(self) };
        self.update(&session, connected.hints()).await?;
        Ok((connected, session))
    }

    /// Lets the user of a call sign in, or sign in again, because the server has refused a request with this challenge.
    pub(super) async fn signed_in_again(
        self: &Arc<Self>,
        call: &Call,
        session: &Session,
        challenge: &str,
    ) -> Result<Session, Failure> {
        let name = &self.config().name;
        if self.config().bearer.is_some() {
            let why = format!("the MCP server {name} refuses its bearer token; the call was not made");
            return Err(Failure::NotSignedIn(Error::new(why)));
        }
        self.note_challenge(challenge);
        if let Some(token) = &session.token {
            session.ended.cancel();
            let url = self.url().map_err(Failure::NotSignedIn)?;
            let app = self.oauth_app(call, &url).await.map_err(Failure::NotSignedIn)?;
            self.refused(call, &app, token, challenge).await;
        }
        self.user_session(call).await
    }

    /// Forgets a token that the server has refused. If it does not permit enough, the user has to permit more.
    async fn refused(&self, call: &Call, app: &OauthApp, token: &Secret, challenge: &str) {
        self.note_challenge(challenge);
        if !challenge.contains("insufficient_scope") {
            return call.forget_token(app, token).await;
        }
        call.remove_token(app, token).await;
        if let (Some(scope), Some(app)) =
            (sign_in::parameter(challenge, "scope"), self.users.app.lock().await.as_mut())
        {
            *app = app.clone().add_scope(&scope);
        }
    }

    fn url(&self) -> Result<Url, Error> {
        match &self.config().source {
            McpSource::Url(url) => Ok(Url::parse(url)?),
            McpSource::Command(_) => Err(Error::new("only servers with a URL need a sign-in")),
        }
    }
}
