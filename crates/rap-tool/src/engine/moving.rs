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
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rap_io::hashing::hash;
use rap_io::secret_box::Key;
use rap_protocol::{CallbackUrl, Migrate, ThreadId, Timestamp};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Semaphore;
use url::Url;

use super::{Engine, Refusal};
use crate::auth::Caller;
use crate::call::Thread;
use crate::directory::random_id;
use crate::error::Error;
use crate::journal::moving::{self, CALL_BYTES, MovedCall};
use crate::journal::{CallSeq, recovery};

/// Maximum number of sessions that are moved at the same time.
const MIGRATIONS: usize = 4;
/// Time that the hook may take. The runtime waits a little longer.
const MIGRATE_WITHIN: Duration = Duration::from_secs(240);

/// Path to which a tool server sends the calls of a session, relative to the base URL of the destination.
pub(crate) const IMPORT_PATH: &str = "/import_calls";
/// Maximum size of a page of calls, in bytes: a call whose texts are escaped in JSON, in base64.
pub(crate) const IMPORT_BYTES: usize = CALL_BYTES as usize * 2 / 3 * 4 + 64 * 1024;
/// Maximum age of a page of calls, and maximum difference of clocks.
const PAGE_AGE: Duration = Duration::from_secs(5 * 60);
const SEALED: &[u8] = b"rap: calls of a session that moves";
/// Number of times that a page is sent to a destination that is overloaded, and the pause before each further time.
const PAGE_TRIES: u32 = 10;
const PAGE_PAUSE: Duration = Duration::from_secs(1);
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
    Failed,
}

/// Reason why calls from another server are refused.
pub(crate) enum ArrivalRefused {
    /// They were not encrypted with the migration key, are too old, or are not calls.
    Invalid(&'static str),
    /// The journal cannot be written.
    Unavailable,
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
    session: ThreadId,
    /// Identifies the caller to a server that knows it; see `Callers::label`.
    caller: Option<String>,
    /// Calls that have arrived before are dropped.
    first: bool,
    /// Random id of the transfer, to which the pages of files belong; see `files.rs`.
    transfer: String,
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
            if let Some(hook) = hook {
                hook(migration).await?;
            }
            match key {
                Some(key) => self.move_calls(key, caller, &request.session_id, &destination).await,
                None => Ok(()),
            }
        });
        let session = &request.session_id;
        match tokio::time::timeout(MIGRATE_WITHIN, moved.catch_unwind()).await {
            Ok(Ok(Ok(()))) => return Migrated::Done,
            Ok(Ok(Err(error))) => tracing::warn!(?session, ?error, "the state of a session was not moved"),
            Ok(Err(_)) => tracing::error!(?session, "the hook that moves the state of a session panicked"),
            Err(_) => tracing::warn!(?session, "the state of a session was not moved in time"),
        }
        Migrated::Failed
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
        let url = CallbackUrl::new(format!("{base}{IMPORT_PATH}"))
            .map_err(|error| Error::new(error.to_string()))?;
        self.callback_rules.check(&url.to_url()).map_err(|error| Error::new(error.to_string()))?;
        let (label, transfer) = (self.callers.label(caller, key), random_id());
        let (mut after, mut first, mut count): (CallSeq, bool, usize) = (0, true, 0);
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
            count += page.calls.len();
            if first || !page.calls.is_empty() {
                let (session, caller, transfer) = (session.clone(), label.clone(), transfer.clone());
                let page = Page { at: self.now(), session, caller, first, transfer, calls: page.calls };
                self.send_sealed(key, url.clone(), &page, SEALED).await?;
                first = false;
            }
            match page.next {
                Some(next) => after = next,
                None => break,
            }
        }
        tracing::info!(?session, calls = count, to = %url, "the calls of a session were copied to another server");
        self.move_files(key, caller, session, &transfer, base).await
    }

    /// Sends a page of state, encrypted with the migration key.
    pub(super) async fn send_sealed(
        &self,
        key: &Key,
        url: CallbackUrl,
        page: &impl Serialize,
        purpose: &'static [u8],
    ) -> Result<(), Error> {
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
            let reply = self.outgoing.post(url.clone(), &[], body.clone()).await;
            let reply =
                reply.map_err(|error| Error::new(format!("the destination does not answer: {error}")))?;
            match reply.status {
                200 => break,
                503 if attempt < PAGE_TRIES => tokio::time::sleep(PAGE_PAUSE).await,
                status => {
                    let why = String::from_utf8_lossy(&reply.body);
                    let why = rap_protocol::visible::text(&why);
                    return Err(Error::new(format!("the destination answered {status}: {why}")));
                }
            }
        }
        Ok(())
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
        opened.ok_or(ArrivalRefused::Invalid(
            "the state was not encrypted with the migration key of this server",
        ))
    }

    /// Refuses a page that was sent long ago.
    pub(super) fn check_age(&self, at: Timestamp) -> Result<(), ArrivalRefused> {
        let now = self.now();
        if now.since(at).max(at.since(now)) > PAGE_AGE {
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
        if page.first {
            self.begin_files(&caller, &page.session, &page.transfer).await?;
        }
        let store = move |engine: &Engine, db: &rusqlite::Connection| {
            if page.first {
                engine.journal.begin_arrival(db, &caller, &page.session)?;
            }
            engine.journal.add_arrivals(db, (&caller, &page.session), &page.calls, now)
        };
        self.write(store).await.ok_or(ArrivalRefused::Unavailable)
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
