//! Discovery, concurrent with model requests.
//!
//! A fetch is a task. There is at most one for each server, and all sessions that need its toolset share it. A model
//! request waits for a short time that is counted from the start of the fetch, so a server that hangs delays few model
//! requests, and those by no more than that time. It waits without a slot of its model, so that it delays no other
//! session. When the fetch ends, the toolset is saved for every session that asked for it, and offered with its next
//! model request.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use rap_agent::Input;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::{Fetched, SessionTools, Toolsets, may_retry};
use crate::settings::ToolServer;
use crate::store::{
    Error, Message, MessageClass, SessionKey, SessionToolset, Source, Target, Thread, ThreadKey,
};

/// Maximum number of sessions that the toolset of one fetch is saved for. Further ones ask again with their next
/// model request.
const MAX_SESSIONS: usize = 1024;

/// The running fetches, by server.
#[derive(Default)]
pub(super) struct Fetches(Mutex<BTreeMap<String, Running>>);

struct Running {
    fetch: Fetch,
    sessions: BTreeMap<SessionKey, Interest>,
}

/// Interest of a session in a toolset.
pub(super) struct Interest {
    /// The thread whose model request asked for it. It gets the notice if the fetch fails.
    thread: ThreadKey,
    /// The error that the session was told about before.
    known_error: Option<String>,
}

/// A fetch that is running or has ended.
#[derive(Clone)]
pub(super) struct Fetch {
    began: Instant,
    /// Time that a model request waits for it.
    wait: Duration,
    /// Wakes waiting tasks in the order in which they came, so that a seed of the simulation always gives the same run.
    outcome: Shared<oneshot::Receiver<Ended>>,
}

#[derive(Clone)]
pub(super) struct Ended {
    pub(super) fetched: Fetched,
    /// False if the store failed.
    saved: bool,
}

impl Fetch {
    /// Waits for the end of the fetch. Returns `None` if the runtime stops.
    pub(super) async fn ended(self) -> Option<Ended> {
        self.outcome.await.ok()
    }

    /// Returns the outcome if the fetch has ended.
    fn ended_now(&self) -> Option<Ended> {
        self.outcome.clone().now_or_never()?.ok()
    }

    /// Like [`Fetch::ended`], but also returns `None` if the fetch takes longer than this.
    pub(super) async fn ended_within(self, time: Duration) -> Option<Ended> {
        timeout_at(self.began + time, self.ended()).await.ok().flatten()
    }
}

/// Fetches that a model request waits for.
#[derive(Default)]
pub(crate) struct AwaitedFetches {
    fetches: Vec<Fetch>,
}

impl AwaitedFetches {
    pub(crate) fn is_empty(&self) -> bool {
        self.fetches.is_empty()
    }

    /// Waits until all have ended or their time is over. Returns false if one broke off or could not be saved.
    pub(crate) async fn ended(self) -> bool {
        let mut all_saved = true;
        for fetch in self.fetches {
            let (deadline, wait) = (fetch.began + fetch.wait, fetch.wait);
            all_saved &= match fetch.ended_within(wait).await {
                Some(ended) => ended.saved,
                None => Instant::now() >= deadline,
            };
        }
        all_saved
    }
}

impl Fetches {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Running>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the fetch from a server that is running now.
    pub(super) fn running(&self, server: &str) -> Option<Fetch> {
        self.lock().get(server).map(|running| running.fetch.clone())
    }
}

impl Toolsets {
    /// Returns the tools for a model request of a thread, without waiting for a server. Toolsets that its session lacks
    /// are fetched. Those that have not arrived are replaced by the newest one that any session has fetched, if there is
    /// one.
    pub(crate) async fn discover(self: &Arc<Self>, thread: &Thread) -> Result<Arc<SessionTools>, Error> {
        let session = thread.session;
        if let Some(tools) = self.cached(session) {
            return Ok(tools);
        }
        let mut forgotten = self.cache().forgotten;
        let mut stored = self.store.session_toolsets(session).await?;
        let fetches = self.fetch_missing(thread, &stored);
        if !fetches.is_empty() {
            self.stand_in(session, fetches).await?;
            forgotten = self.cache().forgotten;
            stored = self.store.session_toolsets(session).await?;
        }
        self.of_session(session, &stored, forgotten).await
    }

    /// Returns the running fetches that the next model request of a thread should wait for. It is empty if the session
    /// has all toolsets, or if the request has waited long enough.
    pub(crate) async fn awaited(self: &Arc<Self>, thread: &Thread) -> Result<AwaitedFetches, Error> {
        if self.cached(thread.session).is_some() {
            return Ok(AwaitedFetches::default());
        }
        let stored = self.store.session_toolsets(thread.session).await?;
        let deadline = |fetch: &Fetch| fetch.began + fetch.wait;
        let fetches = self.fetch_missing(thread, &stored).into_iter().map(|(_, fetch)| fetch);
        let running = fetches.filter(|fetch| fetch.ended_now().is_none() && deadline(fetch) > Instant::now());
        Ok(AwaitedFetches { fetches: running.collect() })
    }

    /// Returns the tools of a session, if they are known and complete. Other nodes may have newer ones.
    fn cached(&self, session: SessionKey) -> Option<Arc<SessionTools>> {
        if self.is_shared() {
            return None;
        }
        let at = self.world.now();
        self.cache().sessions.get(&session).filter(|tools| !tools.needs_discovery(at)).cloned()
    }

    /// Fetches the toolsets that a session lacks.
    fn fetch_missing(
        self: &Arc<Self>,
        thread: &Thread,
        stored: &[SessionToolset],
    ) -> Vec<(&ToolServer, Fetch)> {
        let at = self.world.now();
        let mut fetches = Vec::new();
        for server in &self.servers {
            let before = stored.iter().find(|stored| stored.server == server.url);
            if before.is_some_and(|before| before.toolset.is_some() || !may_retry(before.fetched_at, at)) {
                continue;
            }
            let known_error = before.and_then(|before| before.error.clone());
            let interest = Interest { thread: thread.key, known_error };
            fetches.push((server, self.start_fetch(server, Some((thread.session, interest)))));
        }
        fetches
    }

    /// Saves stand-ins for the toolsets that have not arrived.
    async fn stand_in(&self, session: SessionKey, fetches: Vec<(&ToolServer, Fetch)>) -> Result<(), Error> {
        let mut stand_ins = Vec::new();
        for (server, fetch) in fetches {
            match fetch.ended_now() {
                Some(Ended { saved: true, .. }) => {}
                Some(Ended { saved: false, .. }) => {
                    return Err(Error::Unavailable("a toolset could not be saved".into()));
                }
                None => {
                    let toolset = self.newest(&server.url).await?;
                    stand_ins.extend(toolset.map(|toolset| SessionToolset {
                        session,
                        server: server.url.clone(),
                        toolset: Some(toolset),
                        error: None,
                        fetched_at: self.world.now(),
                        source: Source::StandIn,
                    }));
                }
            }
        }
        if stand_ins.is_empty() {
            return Ok(());
        }
        self.store.save_toolsets(stand_ins).await
    }

    /// Starts a fetch from a server, or joins the one that is running. Its toolset will be saved for the session.
    pub(super) fn start_fetch(
        self: &Arc<Self>,
        server: &ToolServer,
        session: Option<(SessionKey, Interest)>,
    ) -> Fetch {
        let mut all = self.fetches.lock();
        // A task that panicked has left its fetch behind.
        all.retain(|_, running| !matches!(running.fetch.outcome.clone().now_or_never(), Some(Err(_))));
        let running = all.entry(server.url.clone()).or_insert_with(|| {
            let (sender, outcome) = oneshot::channel();
            self.tasks.spawn(Arc::clone(self).run_fetch(server.clone(), sender));
            let wait = server.discovery_within.unwrap_or(self.limits.wait);
            let fetch = Fetch { began: Instant::now(), wait, outcome: outcome.shared() };
            Running { fetch, sessions: BTreeMap::new() }
        });
        if let Some((session, interest)) = session
            && running.sessions.len() < MAX_SESSIONS
        {
            running.sessions.entry(session).or_insert(interest);
        }
        running.fetch.clone()
    }

    async fn run_fetch(self: Arc<Self>, server: ToolServer, sender: oneshot::Sender<Ended>) {
        let fetched = tokio::select! {
            biased;
            () = self.stop.cancelled() => return,
            fetched = self.fetch(&server) => fetched,
        };
        // The fetch stays while its outcome is saved, so that a model request in between does not start another one.
        let sessions = self.fetches.lock().get_mut(&server.url).map(|running| take(&mut running.sessions));
        let mut saved = self.save_for(sessions.unwrap_or_default(), &server.url, &fetched).await;
        let joined = self.fetches.lock().remove(&server.url).map(|running| running.sessions);
        if saved.is_ok() {
            saved = self.save_for(joined.unwrap_or_default(), &server.url, &fetched).await;
        }
        if let Err(error) = &saved {
            tracing::warn!(server = server.url, why = error.with_sources(), "a toolset could not be saved");
        }
        // Sending fails if nobody waits.
        sender.send(Ended { fetched, saved: saved.is_ok() }).ok();
    }

    /// Saves the outcome of a fetch for sessions, and tells them if it failed.
    async fn save_for(
        &self,
        sessions: BTreeMap<SessionKey, Interest>,
        server: &str,
        fetched: &Fetched,
    ) -> Result<(), Error> {
        if sessions.is_empty() {
            return Ok(());
        }
        let last_known = match fetched {
            Fetched::Toolset(_) => None,
            Fetched::Failed(_) => self.newest(server).await?,
        };
        let (at, mut toolsets, mut notices) = (self.world.now(), Vec::new(), Vec::new());
        for (session, interest) in &sessions {
            let mut toolset = fetched.for_session(*session, server, at);
            toolset.toolset = toolset.toolset.or_else(|| last_known.clone());
            if let Some(text) = failure_notice(interest.known_error.as_deref(), &toolset) {
                notices.push(Message::new(Target::Key(interest.thread), Input::Notice { text }));
            }
            // The first row stores the document for all of them.
            if let Some(stored) = toolset.toolset.as_mut().filter(|_| !toolsets.is_empty()) {
                stored.body = None;
            }
            toolsets.push(toolset);
        }
        self.store.save_toolsets(toolsets).await?;
        self.forget(sessions.keys());
        if !notices.is_empty() {
            // Notices are only for people, so a failure to write one is ignored.
            self.store.apply(MessageClass::Internal, notices).await;
        }
        Ok(())
    }
}

/// Returns a notice about a server that failed, unless the session has had the same one before.
fn failure_notice(known_error: Option<&str>, now: &SessionToolset) -> Option<String> {
    let why = now.error.as_deref().filter(|why| known_error != Some(*why))?;
    Some(match now.toolset {
        None => format!("the tools of {} are not available: {why}", now.server),
        Some(_) => {
            format!("the tools of {} could not be fetched: {why}; the last known ones are used", now.server)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise every model request of a new session would wait as long for a server that hangs.
    #[tokio::test(start_paused = true)]
    async fn the_wait_for_a_fetch_is_counted_from_its_start() {
        let (_sender, outcome) = oneshot::channel();
        let (start, wait) = (Instant::now(), Duration::from_secs(1));
        let fetch = Fetch { began: start, wait, outcome: outcome.shared() };
        tokio::time::advance(Duration::from_millis(400)).await;
        assert!(fetch.clone().ended_within(wait).await.is_none());
        assert_eq!(start.elapsed(), wait);
        assert!(fetch.ended_within(wait).await.is_none());
        assert_eq!(start.elapsed(), wait);
    }
}
