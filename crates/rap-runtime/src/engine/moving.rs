//! Moves sessions to another runtime.
//!
//! The session is taken out of use and becomes a parcel. Its tool servers are told to move their state, its records are
//! sent, and the destination checks them. Until then any failure, even a crash, puts the session back into use. From
//! then on it belongs to the destination: this runtime tells it to start the session until it confirms that, and
//! deletes the parcel. So at most one of the two uses the session.
//!
//! A destination that does not have the session any more, or does not answer for longer than it would keep it, ends the move
//! as `lost`: the parcel stays here, out of use, until a person moves the session again.

mod calls;
mod forward;
mod peer;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rap_api::{Destination, DestinationServer, Migrate, Move, StartSession};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{CLOSE_THREAD_PATH, CloseThread, MIGRATE_PATH, ThreadId, Timestamp};
use serde_json::json;
use url::Url;

use self::calls::{InProgress, Marker};
pub(crate) use self::forward::{Forwarded, Forwarding};
use self::peer::{ANSWER_BYTES, Peer, PeerClient, StartAnswer, reason};
use super::Engine;
use crate::settings::ToolServer;
use crate::store::transfer::{Checker, Origin, PAGE_ROWS, Parcel, ParcelState, Record};
use crate::store::{self, Fleet, SessionKey, Visibility};
use crate::toolsets::NO_MEMORY;
use crate::transfer::Arrival;
use crate::world::{MessageKind, To};

/// Time limit of a request to the destination.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Pauses between requests to a destination that does not start the session.
const START_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Maximum number of moves at the same time.
const MOVES: usize = 4;
/// Maximum number of moves whose outcome is remembered.
const REMEMBERED: usize = 1_000;
/// Size at which a page of records is sent, in bytes.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
/// Time after which a session that has arrived and was never started is discarded.
const ARRIVAL_LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);
/// Time after which a destination that does not start the session is given up. It keeps the session for a day less.
const START_FOR: Duration = Duration::from_secs(8 * 24 * 3600);

/// Reason why a session was not moved. The session continues here.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct MoveFailed(String);

impl From<store::Error> for MoveFailed {
    fn from(error: store::Error) -> MoveFailed {
        MoveFailed(error.to_string())
    }
}

/// Reason why a move cannot begin.
#[derive(Debug)]
pub(crate) enum MoveRefused {
    /// It is being moved, or too many sessions are.
    Busy,
    Store(store::Error),
    Invalid(String),
}

/// Outcomes of moves, for people who ask.
#[derive(Default)]
pub(crate) struct Moves {
    leaving: Mutex<HashMap<ThreadId, Move>>,
    /// Sessions that were started here, the oldest first.
    arrived: Mutex<VecDeque<ThreadId>>,
}

fn outcome(state: &str, why: Option<String>) -> Move {
    Move { state: state.into(), why }
}

impl Moves {
    fn state(&self) -> MutexGuard<'_, HashMap<ThreadId, Move>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a session that was moved here and started.
    pub(crate) fn note_arrival(&self, session: ThreadId) {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        if arrived.len() >= REMEMBERED {
            arrived.pop_front();
        }
        arrived.push_back(session);
    }

    /// Returns true if a session was moved here and started, whatever became of it.
    pub(crate) fn has_arrived(&self, session: &ThreadId) -> bool {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).contains(session)
    }

    fn begin(&self, session: &ThreadId) -> bool {
        let mut state = self.state();
        let is_moving = |one: &Move| one.state == "moving";
        if state.get(session).is_some_and(is_moving)
            || state.values().filter(|one| is_moving(one)).count() >= MOVES
        {
            return false;
        }
        if state.len() >= REMEMBERED {
            state.retain(|_, one| is_moving(one));
        }
        state.insert(session.clone(), outcome("moving", None));
        true
    }

    /// Begins to finish a move of an earlier process or another node. Returns false if it is in progress here.
    fn resume(&self, session: &ThreadId) -> bool {
        let moving = outcome("moving", None);
        self.state().insert(session.clone(), moving).is_none_or(|before| before.state != "moving")
    }

    fn end(&self, session: &ThreadId, ended: Result<Move, MoveFailed>) {
        let ended = ended.unwrap_or_else(|failed| outcome("failed", Some(failed.to_string())));
        self.state().insert(session.clone(), ended);
    }

    /// Begins to take a lost session back. Returns its outcome so far, or `None` if it is not lost.
    fn begin_reclaim(&self, session: &ThreadId) -> Option<Move> {
        let mut state = self.state();
        let lost = state.get_mut(session).filter(|one| one.state == "lost")?;
        Some(std::mem::replace(lost, outcome("moving", None)))
    }

    pub(crate) fn get(&self, session: &ThreadId) -> Option<Move> {
        self.state().get(session).cloned()
    }
}

impl Engine {
    /// Begins to move a session. The outcome is in [`Engine::moves`].
    pub(crate) async fn begin_move(
        self: &Arc<Self>,
        session: ThreadId,
        request: Migrate,
    ) -> Result<(), MoveRefused> {
        if let Some(lost) = self.moves.begin_reclaim(&session) {
            let reclaimed = self.reclaim(&session).await;
            let back = || Err(MoveFailed("it was lost, and is back in use".into()));
            self.moves.end(&session, if reclaimed.is_ok() { back() } else { Ok(lost) });
            reclaimed?;
        }
        let row = self.store.thread(&session, &Visibility::All).await.map_err(MoveRefused::Store)?;
        if row.thread.parent.is_some() {
            let why = format!("{session} is not a session: move its root thread {}", row.root_id);
            return Err(MoveRefused::Invalid(why));
        }
        let to = Url::parse(&request.to).ok().filter(|to| matches!(to.scheme(), "http" | "https"));
        let Some(to) = to.filter(|to| to.has_host() && to.username().is_empty()) else {
            return Err(MoveRefused::Invalid("to: expected the URL of another runtime".into()));
        };
        if !self.moves.begin(&session) {
            return Err(MoveRefused::Busy);
        }
        let (token, end_calls) = (request.token, request.end_calls);
        let node = self.store.fleet().map(Fleet::id);
        let client =
            self.peer_client(to, Peer { to: request.to, token, end_calls, servers: Vec::new(), node });
        let engine = Arc::clone(self);
        let key = row.thread.session;
        self.tasks.spawn(async move {
            let outcome = engine.move_session(&session, key, client).await;
            if let Err(failed) = &outcome {
                tracing::warn!(%session, why = %failed, "the session was not moved and continues here");
            }
            engine.moves.end(&session, outcome);
        });
        Ok(())
    }

    /// Puts a session back into use whose move was lost, unless its destination has it.
    async fn reclaim(self: &Arc<Self>, session: &ThreadId) -> Result<(), MoveRefused> {
        let parcels = self.store.parcels().await.map_err(MoveRefused::Store)?;
        let is_this = |parcel: &Parcel| parcel.session == *session && parcel.state == ParcelState::Left;
        let Some(parcel) = parcels.into_iter().find(is_this) else { return Ok(()) };
        let peer = self.open_peer(&parcel);
        let to = peer.as_ref().and_then(|peer| Url::parse(&peer.to).ok());
        let unreadable = || MoveRefused::Invalid("the destination of its last move cannot be read".into());
        let (peer, to) = peer.zip(to).ok_or_else(unreadable)?;
        let client = self.peer_client(to, peer);
        let refused = |why: String| {
            MoveRefused::Invalid(format!(
                "the last move of the session to {} is not over: {why}",
                client.peer.to
            ))
        };
        match client.has_thread(session).await {
            Ok(false) => {}
            Ok(true) => return Err(refused("that runtime has the session".into())),
            Err(failed) => return Err(refused(failed.to_string())),
        }
        self.store.reclaim(session).await.map_err(MoveRefused::Store)?;
        self.take_back(session, &client).await;
        Ok(())
    }

    fn peer_client(&self, to: Url, peer: Peer) -> PeerClient {
        let limits =
            ClientLimits { total: REQUEST_TIMEOUT, drain_bytes: ANSWER_BYTES, ..ClientLimits::default() };
        let rules = self.settings.url_rules().configured(&to);
        PeerClient { http: Client::outgoing(rules, limits), to, peer }
    }

    async fn move_session(
        self: &Arc<Self>,
        session: &ThreadId,
        key: SessionKey,
        mut client: PeerClient,
    ) -> Result<Move, MoveFailed> {
        let since = self.now();
        let destination = client.destination().await?;
        // Tool servers must not copy calls to a destination where another thread with this id would start them.
        if client.has_thread(session).await? {
            let why = format!("the destination has another thread with the id of session {session}");
            return Err(MoveFailed(why));
        }
        let servers = self.servers_to_move(key, &destination).await?;
        let moved = servers.iter().filter(|(server, to)| server.at("").ok() != Url::parse(to.at()).ok());
        client.peer.servers = moved.map(|(server, _)| server.url.clone()).collect();
        let sealed = self.seal_peer(session, &client.peer);
        let mut in_progress: InProgress = self.dispatcher.invocations().collect();
        if let Err(error) = self.store.pack(session, &self.origin, sealed.clone()).await {
            if let store::Error::Unavailable(_) = error {
                // The session may have been packed nevertheless.
                self.restore(session).await;
            }
            return Err(error.into());
        }
        in_progress.extend(self.dispatcher.invocations());
        tracing::info!(%session, "the session was stopped for a move");
        let transferred = match self.check_calls(session, &client.peer, &destination, &in_progress).await {
            Ok(()) => self.transfer(session, &client, &servers, &in_progress).await,
            refused => refused,
        };
        if let Err(failed) = transferred {
            self.take_back(session, &client).await;
            return Err(failed);
        }
        self.mark_left(session, &sealed).await?;
        Ok(self.complete_move(session, &client, since).await)
    }

    /// Records that the destination has the session. Waits while the store is unavailable.
    async fn mark_left(&self, session: &ThreadId, peer: &[u8]) -> Result<(), MoveFailed> {
        loop {
            match self.store.mark_left(session, peer).await {
                Ok(()) => return Ok(()),
                // The destination discards what it got: it must not start a session that is in use here.
                Err(store::Error::NoThread) => {
                    let why =
                        "another node assumed that this node was dead, and put the session back into use";
                    return Err(MoveFailed(why.into()));
                }
                Err(store::Error::Unavailable(_) | store::Error::Busy) if !self.stop.is_cancelled() => {
                    self.pause_for_store().await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the tool servers that have state of a session to move, each with its destination.
    async fn servers_to_move(
        &self,
        session: SessionKey,
        destination: &Destination,
    ) -> Result<Vec<(ToolServer, DestinationServer)>, MoveFailed> {
        let tools = self.toolsets.load(session).await?;
        if tools.servers.iter().any(|server| server.lacks_memory) {
            return Err(MoveFailed(NO_MEMORY.into()));
        }
        let mut servers = Vec::new();
        for server in &self.settings.tool_servers {
            let toolset = tools.server(&server.url).and_then(|tools| tools.toolset.as_ref());
            let Some(toolset) = toolset.filter(|toolset| toolset.needs_migration) else { continue };
            let same_name = |other: &&DestinationServer| other.name.as_deref() == Some(toolset.name.as_str());
            let Some(other) = destination.tool_servers.iter().find(same_name) else {
                let unnamed = destination.tool_servers.iter().filter(|other| other.name.is_none()).count();
                let hint = match unnamed {
                    0 => String::new(),
                    _ => format!(
                        " (it has {unnamed} whose toolset it does not know yet: it fetches them when a session begins there)"
                    ),
                };
                return Err(MoveFailed(format!(
                    "the tool server {} has state of the session, and the destination has no tool server of that \
                     name{hint}",
                    toolset.name
                )));
            };
            servers.push((server.clone(), other.clone()));
        }
        Ok(servers)
    }

    /// Has the tool servers move their state, and sends the records. The destination has checked them at the end.
    async fn transfer(
        &self,
        session: &ThreadId,
        client: &PeerClient,
        servers: &[(ToolServer, DestinationServer)],
        in_progress: &InProgress,
    ) -> Result<(), MoveFailed> {
        for (server, to) in servers {
            self.migrate_server(session, server, to.at()).await?;
        }
        let (mut from, mut sent, mut marker) = (0, 0, Marker::new(in_progress));
        loop {
            let records = self.store.records(session, from).await?;
            let is_last = records.len() < PAGE_ROWS;
            from += records.len() as u64;
            let mut page: Vec<String> = Vec::new();
            for record in records {
                let record = adapted(record, servers, &mut marker)?;
                if !page.is_empty() && page.iter().map(String::len).sum::<usize>() + record.len() > PAGE_BYTES
                {
                    sent += client.send_page(session, sent, std::mem::take(&mut page)).await?;
                }
                page.push(record);
            }
            if !page.is_empty() {
                sent += client.send_page(session, sent, page).await?;
            }
            if is_last {
                break;
            }
        }
        client.post::<serde_json::Value>(session, "check", None, Bytes::from_static(b"{}")).await?;
        Ok(())
    }

    async fn migrate_server(
        &self,
        session: &ThreadId,
        server: &ToolServer,
        to: &str,
    ) -> Result<(), MoveFailed> {
        let failed =
            |why: String| MoveFailed(format!("the tool server {} did not move its state: {why}", server.url));
        if !self.hosts(&server.url) {
            return Err(failed("its process runs on another node; send the request to that node".into()));
        }
        let url = server.at(MIGRATE_PATH).map_err(failed)?;
        let to_server = To::new(&url, Some(&server.url));
        let body = json!({"session_id": session, "destination_url": to}).to_string();
        match self.world.http.post(MessageKind::Migrate, to_server, Bytes::from(body)).await {
            Ok(reply) if reply.status == 200 => Ok(()),
            Ok(reply) => Err(failed(format!("it answered {}: {}", reply.status, reason(&reply.body)))),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// Puts a session whose move failed back into use.
    async fn take_back(self: &Arc<Self>, session: &ThreadId, client: &PeerClient) {
        let discard = client.post::<serde_json::Value>(session, "discard", None, Bytes::from_static(b"{}"));
        if let Err(failed) = discard.await {
            tracing::info!(
                %session,
                why = %failed,
                "the destination could not be told to discard the session; it will do so on its own"
            );
        }
        self.restore(session).await;
    }

    /// Puts a parcel back into use. Waits while the store is unavailable.
    async fn restore(self: &Arc<Self>, session: &ThreadId) {
        while let Err(error) = self.store.unpack(session).await {
            // It was put back before, by an attempt whose outcome was not known.
            if let store::Error::NoThread = error {
                break;
            }
            tracing::error!(%session, why = error.with_sources(), "a session that was to be moved cannot be put back into use");
            match error {
                store::Error::Unavailable(_) | store::Error::Busy if !self.stop.is_cancelled() => {
                    self.pause_for_store().await;
                }
                _ => return,
            }
        }
        tracing::info!(%session, "the session continues here");
        self.resume_all().await;
    }

    /// Starts the due work of sessions that were put into use.
    pub(crate) async fn resume_all(self: &Arc<Self>) {
        Arc::clone(self).resume_work().await;
        self.messages_due.notify_one();
        self.clock_due.notify_one();
    }

    /// Has the destination start the session, and deletes it here. `since` is the time at which the move began. Returns the
    /// outcome, which is `moving` if this runtime stops before.
    async fn complete_move(
        self: &Arc<Self>,
        session: &ThreadId,
        client: &PeerClient,
        since: Timestamp,
    ) -> Move {
        let (mut pause, longest) = START_PAUSE;
        let body = json!(StartSession { end_calls: client.peer.end_calls }).to_string();
        loop {
            let failed = match client.start(session, Bytes::from(body.clone())).await {
                Ok(StartAnswer::InUse) => break,
                Ok(StartAnswer::Unknown) => return lost(session, "it does not have the session any more"),
                Err(failed) if since.plus(START_FOR) < self.now() => {
                    return lost(session, &failed.to_string());
                }
                Err(failed) => failed,
            };
            tracing::warn!(%session, why = %failed, "the destination has not started the session yet");
            tokio::select! {
                () = self.stop.cancelled() => return outcome("moving", None),
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(longest),
            }
        }
        let Some(threads) = self.forget_moved(session, client).await else { return outcome("moving", None) };
        tracing::info!(target: "rap::audit", %session, to = %rap_protocol::redact::url(&client.to), "a session was moved");
        for server in
            self.settings.tool_servers.iter().filter(|server| client.peer.servers.contains(&server.url))
        {
            for thread in &threads {
                self.close_at(server, thread).await;
            }
        }
        outcome("moved", None)
    }

    /// Deletes a session that the destination has started, which gets the callbacks of its threads from now on. Waits
    /// while the store is unavailable. Returns the threads, or `None` if the runtime stops.
    async fn forget_moved(&self, session: &ThreadId, client: &PeerClient) -> Option<Vec<ThreadId>> {
        loop {
            let departed = match self.threads_in(session).await {
                Ok(threads) => {
                    let (ids, named) = threads.into_iter().unzip();
                    let departed = self.store.depart(session, named, client.to.as_str()).await;
                    departed.map(|()| ids).map_err(MoveFailed::from)
                }
                Err(failed) => Err(failed),
            };
            match departed {
                Ok(threads) => return Some(threads),
                Err(failed) => {
                    tracing::warn!(%session, why = %failed, "a session that was moved cannot be deleted yet");
                }
            }
            if self.stop.is_cancelled() {
                return None;
            }
            self.pause_for_store().await;
        }
    }

    /// Tells a tool server that has moved its state that the thread is gone.
    async fn close_at(&self, server: &ToolServer, thread: &ThreadId) {
        let Ok(url) = server.at(CLOSE_THREAD_PATH) else { return };
        let body = json!(CloseThread { thread_id: thread.clone() }).to_string();
        let to = To::new(&url, Some(&server.url));
        if let Err(error) = self.world.http.post(MessageKind::Close, to, Bytes::from(body)).await {
            tracing::info!(server = server.url, %error, "a tool server was not told that a thread has moved");
        }
    }

    fn seal_peer(&self, session: &ThreadId, peer: &Peer) -> Vec<u8> {
        let plain = json!(peer).to_string();
        self.secrets.seal(plain.as_bytes(), &peer_context(session))
    }

    fn open_peer(&self, parcel: &Parcel) -> Option<Peer> {
        let plain = self.secrets.open(&parcel.peer, &peer_context(&parcel.session)).ok()?;
        serde_json::from_slice(&plain).ok()
    }

    /// Returns the parcels that no living node takes care of, each with its destination if it leaves.
    async fn abandoned_parcels(&self) -> Result<Vec<(Parcel, Option<Peer>)>, store::Error> {
        let parcels = self.store.parcels().await?;
        // The nodes are read after the parcels: a node that has packed one of them is among them while it lives.
        let others: HashSet<String> = match self.store.fleet() {
            Some(fleet) => {
                let own = fleet.id();
                fleet.nodes().await?.into_iter().map(|node| node.id).filter(|id| *id != own).collect()
            }
            None => HashSet::new(),
        };
        let with_peer = |parcel: Parcel| {
            let peer = self.open_peer(&parcel);
            (parcel, peer)
        };
        let is_abandoned = |(_, peer): &(Parcel, Option<Peer>)| {
            peer.as_ref().and_then(|peer| peer.node.as_ref()).is_none_or(|node| !others.contains(node))
        };
        Ok(parcels.into_iter().map(with_peer).filter(is_abandoned).collect())
    }

    /// Continues the moves that an earlier process, or a node that is gone, began: those that had not reached their
    /// destination are undone.
    pub(super) async fn resume_moves(self: Arc<Self>) {
        let parcels = loop {
            match self.abandoned_parcels().await {
                Ok(parcels) => break parcels,
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "sessions that move could not be read");
                    self.pause_for_store().await;
                }
            }
            if self.stop.is_cancelled() {
                return;
            }
        };
        for (parcel, peer) in parcels {
            let session = parcel.session;
            match parcel.state {
                ParcelState::Leaving | ParcelState::Left if !self.moves.resume(&session) => {}
                ParcelState::Leaving => {
                    self.restore(&session).await;
                    let why = "the node that moved it ended before the destination had it";
                    self.moves.end(&session, Err(MoveFailed(why.into())));
                }
                ParcelState::Left => {
                    let to = peer.as_ref().and_then(|peer| Url::parse(&peer.to).ok());
                    let Some((peer, to)) = peer.zip(to) else {
                        tracing::error!(%session, "the destination of a session that was moved cannot be read");
                        self.moves.end(&session, Err(MoveFailed("its destination cannot be read".into())));
                        continue;
                    };
                    let (engine, client) = (Arc::clone(&self), self.peer_client(to, peer));
                    self.tasks.spawn(async move {
                        let ended = engine.complete_move(&session, &client, parcel.at).await;
                        engine.moves.end(&session, Ok(ended));
                    });
                }
                ParcelState::Arriving if parcel.at.plus(ARRIVAL_LIFETIME) < self.now() => {
                    if let Err(error) = self.store.drop_parcel(&session).await {
                        tracing::warn!(%session, why = error.with_sources(), "an unfinished import could not be discarded");
                    }
                }
                ParcelState::Arriving => {}
            }
        }
    }

    /// Returns the URL at which this runtime takes state for a tool server that the program around it starts.
    fn started_url(&self, server: &str) -> String {
        format!("{}/started/{server}", self.settings.public_url.trim_end_matches('/'))
    }

    /// Describes this runtime to one that moves a session here.
    pub(crate) async fn as_destination(&self) -> Result<Destination, store::Error> {
        let tools = self.toolsets.latest().await?;
        let servers = self.settings.tool_servers.iter().map(|server| {
            let toolset = tools.server(&server.url).and_then(|tools| tools.toolset.as_ref());
            let address = match &server.started {
                // Its port is not reached from another machine; see `http/started.rs`.
                Some(started) if server.migration_key.is_some() => {
                    started.port().map(|_| self.started_url(&server.url))
                }
                _ => server.at("").ok().map(|url| url.as_str().trim_end_matches('/').to_owned()),
            };
            let name = toolset.map(|toolset| toolset.name.clone());
            DestinationServer { name, url: server.url.clone(), address }
        });
        let Origin { key_id, key_ids, public_url } = self.origin.clone();
        Ok(Destination { key_id, key_ids, public_url, tool_servers: servers.collect() })
    }
}

/// Names the tool servers of the destination in a record, instead of those that have moved their state there, and marks
/// calls that may have been sent.
fn adapted(
    text: String,
    servers: &[(ToolServer, DestinationServer)],
    marker: &mut Marker<'_>,
) -> Result<String, MoveFailed> {
    let mut record = Record::read(&text).map_err(MoveFailed)?;
    if !marker.take(&mut record) && servers.is_empty() {
        return Ok(text);
    }
    for (server, to) in servers {
        record.rename_server(&server.url, &to.url);
    }
    Ok(record.write())
}

/// Ends a move whose destination does not confirm that it has the session. It may have deleted it.
fn lost(session: &ThreadId, why: &str) -> Move {
    tracing::error!(
        %session,
        why,
        "the destination of a session that was moved does not confirm that it has it; its records stay here, out of use: \
         to use them, move the session again"
    );
    outcome("lost", Some(why.to_owned()))
}

fn peer_context(session: &ThreadId) -> Vec<u8> {
    [b"parcel ".as_slice(), session.as_str().as_bytes()].concat()
}

/// Reads a parcel that has arrived as if it were a file. Returns `None` if there is none.
pub(crate) async fn read_arrival<'a>(
    store: &'a dyn store::Store,
    session: &ThreadId,
) -> Result<Option<Arrival<'a>>, crate::transfer::TransferError> {
    if store.parcel_of(session).await? != Some(ParcelState::Arriving) {
        return Ok(None);
    }
    let (mut from, mut arrival, mut checker) = (0, None, Checker::default());
    loop {
        let records = store.records(session, from).await?;
        if records.is_empty() {
            let why = || "the session is not complete: send the missing records".to_owned();
            return match &arrival {
                Some(_) if !checker.is_complete() => {
                    Err(crate::transfer::TransferError::Line { line: from, why: why() })
                }
                _ => Ok(arrival),
            };
        }
        for text in &records {
            from += 1;
            let failed = |why| crate::transfer::TransferError::Line { line: from, why };
            let record = Record::read(text).map_err(failed)?;
            checker.take(&record).map_err(failed)?;
            if let Record::Session(header) = &record {
                arrival = Some(Arrival::stored(store, header.clone()));
            }
            if let Some(arrival) = &mut arrival {
                arrival.note(&record);
            }
        }
    }
}
