//! Moves the state of a session to another tool server, when a runtime moves the session elsewhere: the author's hook, and
//! the calls in the journal.
//!
//! Calls go in encrypted pages to `/import_calls` of the destination, which has the same migration key. There they wait
//! until their caller asks about one of them, so a move that fails starts nothing. The directories of threads follow
//! (`files.rs`).

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderMap;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rap_io::hashing::hash;
use rap_io::moving::{PROOF, is_proven, is_recent, proof};
use rap_io::secret_box::Key;
use rap_protocol::{CallbackUrl, Migrate, ThreadId, Timestamp};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Semaphore;
use url::Url;

use super::files::unwritable;
use super::{Engine, Refusal, lock};
use crate::auth::Caller;
use crate::call::Thread;
use crate::directory::random_id;
use crate::error::Error;
use crate::journal::moving::{self, CALL_BYTES, MovedCall, RunningCall};
use crate::journal::{CallSeq, recovery};
use crate::rules::OnRestart;

/// Maximum number of sessions that are moved at the same time.
const MIGRATIONS: usize = 4;
/// Time in which the state of a session has to be moved. The runtime waits a little longer.
const MIGRATE_WITHIN: Duration = Duration::from_secs(240);
/// Pause after a handler has ended, before the calls of the session are read again.
const RUN_PAUSE: Duration = Duration::from_millis(20);

/// Path to which a tool server sends the calls of a session, relative to the base URL of the destination.
pub(crate) const IMPORT_PATH: &str = "/import_calls";
/// Maximum size of a page of calls, in bytes: a call whose texts are escaped in JSON, in base64.
pub(crate) const IMPORT_BYTES: usize = CALL_BYTES as usize * 2 / 3 * 4 + 64 * 1024;
const SEALED: &[u8] = b"rap: calls of a session that moves";
/// Number of times that a page is sent to a destination that is overloaded, and the pause before each further time.
const PAGE_TRIES: u32 = 10;
const PAGE_PAUSE: Duration = Duration::from_secs(1);
/// Maximum length of the reason of a destination that refuses state, in bytes.
const REASON_BYTES: usize = 300;
/// Reason why state of an unknown caller is refused.
pub(super) const WITHOUT_CALLER: &str = "this server has several callers, and none of them is known by the same token or \
                                         name as at the other server";

/// The hook of `ToolServer::migrate`.
pub(crate) type MigrateHook = Arc<dyn Fn(Migration) -> BoxFuture<'static, Result<(), Error>> + Send + Sync>;

/// A session that a runtime moves to another runtime, and the tool server that takes its state; see
/// [`ToolServer::migrate`](crate::ToolServer::migrate).
#[derive(Clone)]
pub struct Migration {
    session: Thread,
    destination: Url,
}

impl Migration {
    /// Returns the root thread of the session.
    pub fn session(&self) -> &Thread {
        &self.session
    }

    /// Returns the base URL of the tool server of the same name at the destination. It is named by the runtime: send
    /// state only to servers that you know.
    pub fn destination(&self) -> &Url {
        &self.destination
    }
}

/// Outcome of a migration.
pub(crate) enum Migrated {
    Done,
    /// Too many sessions are being moved.
    Busy,
    /// The session goes on here. The text says why.
    Failed(String),
}

/// Reason why calls from another server are refused.
pub(crate) enum ArrivalRefused {
    /// They were not encrypted with the migration key, are too old, or are not calls.
    Invalid(&'static str),
    /// The journal cannot be written.
    Unavailable,
}

impl ArrivalRefused {
    pub(crate) const NO_KEY: ArrivalRefused = ArrivalRefused::Invalid(
        "the state was not encrypted with the migration key of this server, or the clocks of the servers differ by more \
         than five minutes",
    );
}

/// The hook, the key that this server shares with others, and slots.
pub(crate) struct Migrations {
    hook: Option<MigrateHook>,
    key: Option<Key>,
    slots: Semaphore,
}

impl Migrations {
    pub(super) fn new(hook: Option<MigrateHook>, key: Option<Key>) -> Migrations {
        Migrations { hook, key, slots: Semaphore::new(MIGRATIONS) }
    }
}

/// Calls of a session, as they are sent.
#[derive(Serialize, Deserialize)]
struct Page {
    at: Timestamp,
    /// Identifies the server that sends it.
    from: String,
    session: ThreadId,
    /// Identifies the caller to a server that knows it; see `Callers::label`.
    caller: Option<String>,
    /// Random id of the transfer, to which the pages of files belong; see `files.rs`.
    transfer: String,
    /// Number of this page among the pages of calls. The first one begins the transfer.
    number: u64,
    calls: Vec<MovedCall>,
}

#[derive(Serialize, Deserialize)]
struct SealedPage {
    sealed: String,
}

impl Engine {
    /// Moves the state of a caller's session. All of it is at the destination if this returns [`Migrated::Done`].
    pub(crate) async fn migrate(self: &Arc<Self>, caller: &Caller, request: Migrate) -> Migrated {
        let Migrations { hook, key, slots } = &self.migrations;
        let Ok(_slot) = slots.try_acquire() else { return Migrated::Busy };
        let session = self.thread(caller, &request.session_id);
        let migration = Migration { session, destination: request.destination_url.to_url() };
        let destination = migration.destination.clone();
        // The author's code runs inside the future, where a panic is caught.
        let moved = AssertUnwindSafe(async {
            if key.is_some() {
                self.finish_calls(caller, &request.session_id).await?;
            }
            if let Some(hook) = hook {
                hook(migration).await?;
            }
            match key {
                Some(key) => self.move_calls(key, caller, &request.session_id, &destination).await,
                None => Ok(()),
            }
        });
        let session = &request.session_id;
        let why = match tokio::time::timeout(MIGRATE_WITHIN, moved.catch_unwind()).await {
            Ok(Ok(Ok(()))) => return Migrated::Done,
            Ok(Ok(Err(error))) => {
                tracing::warn!(?session, ?error, "the state of a session was not moved");
                error.for_model()
            }
            Ok(Err(_)) => {
                tracing::error!(?session, "the hook that moves the state of a session panicked");
                "the hook that moves it panicked".into()
            }
            Err(_) => {
                tracing::warn!(?session, "the state of a session was not moved in time");
                format!(
                    "that took longer than {} seconds: it is too large, or the other server is too slow",
                    MIGRATE_WITHIN.as_secs()
                )
            }
        };
        Migrated::Failed(Arc::clone(&self.scrubber).scrub(why).await)
    }

    /// Waits until no call of a session is running whose handler cannot run again at the destination. Its result, and what
    /// it writes into files, would be lost there. Calls have as long to finish as when the server is shut down.
    async fn finish_calls(self: &Arc<Self>, caller: &Caller, session: &ThreadId) -> Result<(), Error> {
        let (end, mut after) = (tokio::time::Instant::now() + self.limits.stop_within, 0);
        loop {
            let (owner, id) = (caller.clone(), session.clone());
            let read =
                move |_: &Engine, db: &rusqlite::Connection| moving::running_calls(db, &owner, &id, after);
            let page = self.write_for(caller, read).await;
            let page = page.ok_or_else(|| Error::new("the journal cannot be read"))?;
            let is_lost = |call: &&RunningCall| self.on_restart(&call.operation) == OnRestart::Fail;
            match (page.calls.iter().find(is_lost), page.next) {
                (Some(call), _) => {
                    let ended = async {
                        self.run_over(call.seq).await;
                        tokio::time::sleep(RUN_PAUSE).await;
                    };
                    let still_running = |_| {
                        Error::new(format!(
                            "call {} of {} is still running, and what it does cannot move: wait for its end, or cancel it",
                            call.id.as_str(),
                            call.operation
                        ))
                    };
                    tokio::time::timeout_at(end, ended).await.map_err(still_running)?;
                }
                (None, Some(next)) => after = next,
                (None, None) => return Ok(()),
            }
        }
    }

    /// Resolves when a handler has ended.
    async fn run_over(&self, call: CallSeq) {
        loop {
            let ended = self.run_ended.notified();
            if !lock(&self.runs).contains_key(&call) {
                return;
            }
            ended.await;
        }
    }

    /// Copies the calls of a session, and the directories of its threads, to another server.
    async fn move_calls(
        self: &Arc<Self>,
        key: &Key,
        caller: &Caller,
        session: &ThreadId,
        destination: &Url,
    ) -> Result<(), Error> {
        let base = destination.as_str().trim_end_matches('/');
        if base == self.public_url {
            return Ok(());
        }
        if destination.query().is_some() || destination.fragment().is_some() {
            return Err(Error::new("the URL of the destination must have no query and no fragment"));
        }
        let (label, transfer) = (self.callers.label(caller, key), random_id());
        let (mut after, mut number, mut count): (CallSeq, u64, usize) = (0, 0, 0);
        loop {
            let (owner, id) = (caller.clone(), session.clone());
            let read = move |engine: &Engine, db: &rusqlite::Connection| {
                engine.journal.session_calls(db, &owner, &id, after)
            };
            let page = self.write_for(caller, read).await;
            let page = page.ok_or_else(|| Error::new("the journal cannot be read"))?;
            if let Some(id) = page.too_large {
                let why = format!("the call {id} has more than {CALL_BYTES} bytes; let it end first");
                return Err(Error::new(why));
            }
            // An invocation that was on its way when the runtime stopped the session.
            let is_lost =
                |call: &MovedCall| call.is_running() && self.on_restart(&call.operation) == OnRestart::Fail;
            if page.calls.iter().any(is_lost) {
                return Err(Error::new("a call began while the session was being moved; try again"));
            }
            count += page.calls.len();
            if number == 0 || !page.calls.is_empty() {
                let page = Page {
                    at: self.now(),
                    from: self.server_id(key),
                    session: session.clone(),
                    caller: label.clone(),
                    transfer: transfer.clone(),
                    number,
                    calls: page.calls,
                };
                self.send_sealed(key, (base, IMPORT_PATH), &page, SEALED).await?;
                number += 1;
            }
            match page.next {
                Some(next) => after = next,
                None => break,
            }
        }
        tracing::info!(
            ?session,
            calls = count,
            to = base,
            "the calls of a session were copied to another server"
        );
        self.move_files(key, caller, session, &transfer, base).await
    }

    /// Sends a page of state, encrypted with the migration key, to a path of the destination.
    pub(super) async fn send_sealed(
        &self,
        key: &Key,
        (base, path): (&str, &'static str),
        page: &impl Serialize,
        purpose: &'static [u8],
    ) -> Result<(), Error> {
        let url = CallbackUrl::new(format!("{base}{path}"));
        let url = url.map_err(|error| Error::new(error.to_string()))?;
        self.callback_rules.check(&url.to_url()).map_err(|error| Error::new(error.to_string()))?;
        let sender = key.clone();
        let plain = serde_json::to_vec(page).map_err(|error| Error::new(error.to_string()))?;
        let key = key.clone();
        let seal = move || {
            let sealed = BASE64_STANDARD.encode(key.seal(&plain, purpose));
            Bytes::from(json!(SealedPage { sealed }).to_string())
        };
        let body = hash(usize::MAX, seal).await;
        if body.len() > IMPORT_BYTES {
            return Err(Error::new("a call is too large to be moved; let it end first"));
        }
        for attempt in 1.. {
            let headers = [(PROOF, proof(&sender, path, self.now()))];
            let reply = self.outgoing.post(url.clone(), &headers, body.clone()).await;
            let reply =
                reply.map_err(|error| Error::new(format!("the destination does not answer: {error}")))?;
            match reply.status {
                200 => break,
                503 if attempt < PAGE_TRIES => tokio::time::sleep(PAGE_PAUSE).await,
                status => {
                    let text = String::from_utf8_lossy(&reply.body);
                    tracing::warn!(%url, status, answer = %rap_protocol::visible::text(&text), "state was refused");
                    let why = refusal_of(&reply.body);
                    return Err(Error::new(format!("the destination answered {status}{why}")));
                }
            }
        }
        Ok(())
    }

    /// Returns true if the sender of a request knows the migration key.
    pub(crate) fn is_sender(&self, path: &str, headers: &HeaderMap) -> bool {
        self.migrations.key.as_ref().is_some_and(|key| is_proven(key, path, headers, self.now()))
    }

    /// Opens a page of state that another server has sent.
    pub(super) async fn open_sealed<T: DeserializeOwned + Send + 'static>(
        &self,
        body: Bytes,
        purpose: &'static [u8],
    ) -> Result<(T, Key), ArrivalRefused> {
        let key = self.migrations.key.clone();
        let open = move || {
            let key = key?;
            let page: SealedPage = serde_json::from_slice(&body).ok()?;
            let plain = key.open(&BASE64_STANDARD.decode(page.sealed).ok()?, purpose).ok()?;
            Some((serde_json::from_slice::<T>(&plain).ok()?, key))
        };
        let opened = hash(usize::MAX, open).await;
        opened.ok_or(ArrivalRefused::NO_KEY)
    }

    /// Returns a text that identifies this server to those with the same migration key.
    fn server_id(&self, key: &Key) -> String {
        let own = self.journal.key.mac(&[b"server"]);
        BASE64_STANDARD.encode(&key.mac(&[b"server", &own])[..16])
    }

    /// Refuses a page that was sent long ago.
    pub(super) fn check_age(&self, at: Timestamp) -> Result<(), ArrivalRefused> {
        if !is_recent(at, self.now()) {
            return Err(ArrivalRefused::Invalid(
                "the state was sent more than five minutes ago, or the clocks of the servers differ",
            ));
        }
        Ok(())
    }

    /// Returns true if the server has state of sessions that it can move.
    pub(crate) fn moves_sessions(&self) -> bool {
        self.migrations.hook.is_some() || self.migrations.key.is_some()
    }

    /// Returns true if calls from other servers are accepted.
    pub(crate) fn accepts_calls(&self) -> bool {
        self.migrations.key.is_some()
    }

    /// Stores calls that another server has sent.
    pub(crate) async fn receive_calls(self: &Arc<Self>, body: Bytes) -> Result<(), ArrivalRefused> {
        let (page, key) = self.open_sealed::<Page>(body, SEALED).await?;
        let page = Arc::new(page);
        self.check_age(page.at)?;
        if page.from == self.server_id(&key) {
            return Err(ArrivalRefused::Invalid("this server has sent the state itself"));
        }
        let caller = self.callers.with_label(page.caller.as_deref(), &key);
        let caller = caller.ok_or(ArrivalRefused::Invalid(WITHOUT_CALLER))?;
        let are_valid = hash(usize::MAX, {
            let page = Arc::clone(&page);
            move || page.calls.iter().all(MovedCall::is_valid)
        })
        .await;
        let permitted = |call: &MovedCall| self.callback_rules.check(&call.callback_url.to_url()).is_ok();
        if !are_valid || !page.calls.iter().all(permitted) {
            return Err(ArrivalRefused::Invalid(
                "a call is not valid, or this server may not send to its callback URL",
            ));
        }
        let now = self.now();
        let session = self.thread(&caller, &page.session).key().to_owned();
        let turn = self.next_calls(session, (&page.transfer, page.number), page.at).await?;
        let store = move |engine: &Engine, db: &rusqlite::Connection| {
            if page.number == 0 {
                engine.journal.begin_arrival(db, &caller, &page.session)?;
            }
            engine.journal.add_arrivals(db, (&caller, &page.session), &page.calls, now)
        };
        self.write(store).await.ok_or(ArrivalRefused::Unavailable)?;
        turn.finish().await.map_err(unwritable)
    }

    /// Puts the files and calls of a session that has arrived into use, if the thread belongs to one. The caller has the
    /// session by now, since it asks. Fails if that cannot be done now.
    pub(crate) async fn activate(
        self: &Arc<Self>,
        caller: &Caller,
        thread: &ThreadId,
        ancestors: &[ThreadId],
    ) -> Result<(), Refusal> {
        if self.migrations.key.is_none() {
            return Ok(());
        }
        let unavailable = |error: io::Error| {
            tracing::warn!(%error, "the files of a session that was moved here cannot be put into use");
            Refusal::Unavailable
        };
        self.place_files(caller, ancestors.first().unwrap_or(thread)).await.map_err(unavailable)?;
        let (owner, id) = (caller.clone(), thread.clone());
        let find = move |_: &Engine, db: &rusqlite::Connection| moving::arrived_session(db, &owner, &id);
        let Some(session) = self.write_for(caller, find).await.flatten() else { return Ok(()) };
        if let Ok(session) = ThreadId::new(session.clone()) {
            self.place_files(caller, &session).await.map_err(unavailable)?;
        }
        loop {
            let (owner, id) = (caller.clone(), session.clone());
            let activate = move |engine: &Engine, db: &rusqlite::Connection| {
                let (calls, more) = engine.journal.activate(db, &owner, &id)?;
                Ok((recovery::unfinished_of(db, &calls)?, more))
            };
            let Some((calls, more)) = self.write_for(caller, activate).await else { return Ok(()) };
            tracing::info!(session, calls = calls.len(), "calls of a session that was moved here continue");
            self.resume_page(calls).await;
            if !more {
                break;
            }
        }
        self.due.notify_one();
        Ok(())
    }
}

/// Returns the reason that a tool server gives for refusing state. The answer of anything else is not told: the caller chose
/// the URL, and must not learn what other services answer to this server.
fn refusal_of(answer: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Answer {
        error: Reason,
    }
    #[derive(Deserialize)]
    struct Reason {
        code: String,
        message: String,
    }
    let is_known = |code: &str| matches!(code, "not_accepted" | "not_found" | "overloaded" | "unavailable");
    match serde_json::from_slice::<Answer>(answer) {
        Ok(Answer { error }) if is_known(&error.code) && error.message.len() <= REASON_BYTES => {
            format!(": {}", rap_protocol::visible::text(&error.message))
        }
        _ => String::new(),
    }
}
