//! A wrapper around the real store. Operations take time, the process may crash before and after each of them, and
//! prompts are compared with the reference store.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Seq, StatusCheck, Usage, prompt::visible_entries};
use rap_io::metrics::Exposition;
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};

use super::invariants::Violation;
use super::reference::index_of;
use super::state::Sim;
use crate::store::transfer::{Export, Origin, Parcel, ParcelState, TokenThread, Transfer};
use crate::store::{
    CallRow, ClaimedAlerts, ClientToken, Delivery, DeliveryFilter, DeliveryRecord, DuePage, DueWork, Error,
    Expired, Expiry, FiguresRow, HistoryPage, InboxItem, LongestPauses, Message, MessageClass,
    NewClientToken, OutboxKey, OutboxMessage, Page, PageRequest, Receipt, Redelivery, Remaining, SessionKey,
    SessionToolset, SqliteStore, Store, StoreCounts, SubscriptionRow, Target, Thread, ThreadFilter,
    ThreadKey, ThreadRow, Timer, TimerRow, TokenDigest, TokenId, ViewKey, ViewRow, Visibility, Work, WorkKey,
    WorkKind, WorkQueue,
};

pub(super) struct SimStore {
    pub(super) sim: Arc<Sim>,
    pub(super) store: SqliteStore,
}

impl SimStore {
    /// Runs a store operation with a possible pause or crash before and after it.
    async fn with_pauses<T>(&self, operation: impl Future<Output = T>) -> T {
        self.sim.pause_or_crash().await;
        let done = operation.await;
        self.sim.pause_or_crash().await;
        done
    }

    /// I9: the model sees the history of its thread up to the model request, and nothing else.
    fn check_prompt(&self, thread: &Thread, up_to: Seq, entries: &[Entry]) {
        let mut state = self.sim.state();
        let state = &mut *state;
        let index = index_of(thread.key);
        if let Some(task) = tokio::task::try_id() {
            state.asking.insert(task, (index, up_to));
        }
        let visible: Vec<Entry> = state.reference.visible(index, up_to).into_iter().cloned().collect();
        if state.visitor.is_some() {
            state.show(&visible);
        }
        let expected = visible_entries((1..).zip(visible).collect());
        if expected != entries {
            let at = expected.iter().zip(entries).position(|(one, other)| one != other);
            let differ = at.map(|at| (&entries[at], &expected[at]));
            let text = format!(
                "I9: the model of t{index} gets {} entries up to {up_to} instead of {}, the first difference: {differ:?}",
                entries.len(),
                expected.len(),
            );
            state.record(Err(Violation(text)));
        }
    }
}

#[async_trait]
impl Store for SimStore {
    async fn apply(&self, class: MessageClass, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        self.with_pauses(self.store.apply(class, messages)).await
    }

    async fn thread(&self, id: &ThreadId, visible: &Visibility) -> Result<ThreadRow, Error> {
        self.with_pauses(self.store.thread(id, visible)).await
    }

    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error> {
        self.store.threads(filter).await
    }

    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error> {
        self.store.history(thread, page).await
    }

    async fn history_bytes(&self, thread: &Thread, page: HistoryPage) -> Result<usize, Error> {
        self.store.history_bytes(thread, page).await
    }

    async fn prompt_entries(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        self.sim.pause_or_crash().await;
        let entries = self.store.prompt_entries(thread, up_to).await?;
        self.check_prompt(thread, up_to, &entries);
        self.sim.pause_or_crash().await;
        Ok(entries)
    }

    async fn entries_since_user(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        self.store.entries_since_user(thread, up_to).await
    }

    async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error> {
        self.store.displays(row).await
    }

    async fn cause(&self, thread: &Thread) -> Result<Cause, Error> {
        self.with_pauses(self.store.cause(thread)).await
    }

    async fn server_of_call(&self, thread: ThreadKey, call: &CallId) -> Result<Option<String>, Error> {
        self.with_pauses(self.store.server_of_call(thread, call)).await
    }

    async fn has_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error> {
        self.with_pauses(self.store.has_call(thread, call)).await
    }

    async fn session_usage(&self, session: SessionKey) -> Result<(Usage, u64), Error> {
        self.store.session_usage(session).await
    }

    async fn views(
        &self,
        thread: ThreadKey,
        after: Option<ViewKey>,
    ) -> Result<Page<ViewRow, ViewKey>, Error> {
        self.store.views(thread, after).await
    }

    async fn view(&self, thread: ThreadKey, key: &ViewKey) -> Result<Option<ViewRow>, Error> {
        self.store.view(thread, key).await
    }

    async fn inbox(
        &self,
        thread: Option<ThreadKey>,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<InboxItem>, Error> {
        self.store.inbox(thread, visible, page_request).await
    }

    async fn calls(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<CallRow>, Error> {
        self.store.calls(visible, page_request).await
    }

    async fn subscriptions(
        &self,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<SubscriptionRow>, Error> {
        self.store.subscriptions(visible, page_request).await
    }

    async fn timers(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<TimerRow>, Error> {
        self.store.timers(visible, page_request).await
    }

    async fn session_toolsets(&self, session: SessionKey) -> Result<Vec<SessionToolset>, Error> {
        self.with_pauses(self.store.session_toolsets(session)).await
    }

    async fn toolset(&self, hash: &str) -> Result<Option<Vec<u8>>, Error> {
        self.with_pauses(self.store.toolset(hash)).await
    }

    async fn newest_toolset(&self, server: &str) -> Result<Option<String>, Error> {
        self.with_pauses(self.store.newest_toolset(server)).await
    }

    async fn save_toolsets(&self, toolsets: Vec<SessionToolset>) -> Result<(), Error> {
        self.with_pauses(self.store.save_toolsets(toolsets)).await
    }

    async fn destinations(&self, kind: WorkKind) -> Result<Vec<String>, Error> {
        self.with_pauses(self.store.destinations(kind)).await
    }

    async fn due_work(&self, queue: &WorkQueue, page: DuePage) -> Result<DueWork, Error> {
        self.with_pauses(self.store.due_work(queue, page)).await
    }

    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error> {
        self.with_pauses(self.store.load_work(key, now)).await
    }

    async fn set_aside(&self, target: &Target, why: String, now: Timestamp) -> Result<(), Error> {
        self.with_pauses(self.store.set_aside(target, why, now)).await
    }

    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error> {
        self.with_pauses(self.store.postpone(key, at, attempts, outcome)).await
    }

    async fn redirect(&self, key: &WorkKey, destination: &str) -> Result<(), Error> {
        self.with_pauses(self.store.redirect(key, destination)).await
    }

    async fn answer_delivered(&self, key: &WorkKey, attempts: u32) -> Result<(), Error> {
        self.with_pauses(self.store.answer_delivered(key, attempts)).await
    }

    async fn acknowledge(&self, calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Result<(), Error> {
        let known = calls.clone();
        self.sim.pause_or_crash().await;
        let done = self.store.acknowledge(calls, at).await;
        if done.is_ok() {
            let mut state = self.sim.state();
            let at = state.simulated_time(at);
            known.iter().for_each(|(_, call)| state.checker.on_invocation_recorded(call, at));
        }
        self.sim.pause_or_crash().await;
        done
    }

    async fn record_check(&self, thread: ThreadKey, call: &CallId, check: StatusCheck) -> Result<(), Error> {
        self.sim.pause_or_crash().await;
        let done = self.store.record_check(thread, call, check).await;
        if done.is_ok() {
            let mut state = self.sim.state();
            let at = state.simulated_time(check.checked_at);
            state.checker.on_check_recorded(call, check, at);
        }
        self.sim.pause_or_crash().await;
        done
    }

    async fn due_messages(
        &self,
        now: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<OutboxMessage>, Error> {
        self.with_pauses(self.store.due_messages(now, skip, limit)).await
    }

    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error> {
        self.with_pauses(self.store.due_timers(now, late_after, skip, limit)).await
    }

    async fn postpone_due(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error> {
        self.with_pauses(self.store.postpone_due(timers, messages, now, at)).await
    }

    async fn end_long_pauses(&self, now: Timestamp, longest: LongestPauses) -> Result<(), Error> {
        self.with_pauses(self.store.end_long_pauses(now, longest)).await
    }

    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error> {
        self.with_pauses(self.store.next_due(after)).await
    }

    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error> {
        self.with_pauses(self.store.record_deliveries(records)).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error> {
        self.store.deliveries(filter).await
    }

    async fn delivery(&self, id: &str, visible: &Visibility) -> Result<Option<Delivery>, Error> {
        self.store.delivery(id, visible).await
    }

    async fn redeliver(&self, id: &str, visible: &Visibility, now: Timestamp) -> Result<Redelivery, Error> {
        self.with_pauses(self.store.redeliver(id, visible, now)).await
    }

    async fn claim_alerts(
        &self,
        destination: &str,
        now: Timestamp,
        until: Timestamp,
        limit: usize,
    ) -> Result<ClaimedAlerts, Error> {
        self.store.claim_alerts(destination, now, until, limit).await
    }

    async fn settle_alert(&self, number: i64, next: Option<Timestamp>) -> Result<(), Error> {
        self.store.settle_alert(number, next).await
    }

    async fn expire_alerts(&self, before: Timestamp) -> Result<(), Error> {
        self.store.expire_alerts(before).await
    }

    async fn add_token(&self, token: NewClientToken, max: usize) -> Result<Option<TokenId>, Error> {
        self.store.add_token(token, max).await
    }

    async fn token(&self, digest: &TokenDigest) -> Result<Option<ClientToken>, Error> {
        self.store.token(digest).await
    }

    async fn tokens(&self, page_request: PageRequest) -> Result<Page<ClientToken>, Error> {
        self.store.tokens(page_request).await
    }

    async fn token_used(&self, id: TokenId, at: Timestamp) -> Result<(), Error> {
        self.store.token_used(id, at).await
    }

    async fn add_figures(&self, rows: Vec<FiguresRow>, now: Timestamp) -> Result<(), Error> {
        self.store.add_figures(rows, now).await
    }

    async fn figures(&self, since: Timestamp, step: i64) -> Result<Vec<FiguresRow>, Error> {
        self.store.figures(since, step).await
    }

    async fn statuses(&self, user: &UserId) -> Result<Vec<(String, i64)>, Error> {
        self.store.statuses(user).await
    }

    async fn revoke_token(&self, id: TokenId) -> Result<bool, Error> {
        self.store.revoke_token(id).await
    }

    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error> {
        self.with_pauses(self.store.prune(keys_before, deliveries_before)).await
    }

    async fn delete_session(&self, id: &ThreadId, visible: &Visibility) -> Result<(), Error> {
        self.store.delete_session(id, visible).await
    }

    async fn expire_sessions(
        &self,
        before: Timestamp,
        after: Option<ThreadKey>,
        expiry: Expiry,
    ) -> Result<Expired, Error> {
        self.store.expire_sessions(before, after, expiry).await
    }

    async fn delete_batch(&self) -> Result<Remaining, Error> {
        self.store.delete_batch().await
    }

    async fn counts(&self) -> Result<StoreCounts, Error> {
        self.store.counts().await
    }

    fn expose(&self, text: &mut Exposition) {
        self.store.expose(text);
    }

    async fn is_readable(&self) -> Result<(), Error> {
        self.store.is_readable().await
    }

    async fn close(&self) {
        self.store.close().await;
    }
}

/// The simulation moves no sessions.
#[async_trait]
impl Export for SimStore {
    async fn export(
        &self,
        session: &ThreadId,
        origin: &Origin,
        records: tokio::sync::mpsc::Sender<String>,
    ) -> Result<(), Error> {
        self.store.export(session, origin, records).await
    }

    async fn roots(&self, after: Option<ThreadKey>) -> Result<Vec<(ThreadKey, ThreadId)>, Error> {
        self.store.roots(after).await
    }
}

#[async_trait]
impl Transfer for SimStore {
    async fn pack(&self, session: &ThreadId, origin: &Origin, peer: Vec<u8>) -> Result<(), Error> {
        self.store.pack(session, origin, peer).await
    }

    async fn begin_parcel(&self, session: &ThreadId) -> Result<(), Error> {
        self.store.begin_parcel(session).await
    }

    async fn add_records(&self, session: &ThreadId, first: u64, records: Vec<String>) -> Result<(), Error> {
        self.store.add_records(session, first, records).await
    }

    async fn unpack(&self, session: &ThreadId) -> Result<(), Error> {
        self.store.unpack(session).await
    }

    async fn records(&self, session: &ThreadId, from: u64) -> Result<Vec<String>, Error> {
        self.store.records(session, from).await
    }

    async fn parcels(&self) -> Result<Vec<Parcel>, Error> {
        self.store.parcels().await
    }

    async fn mark_left(&self, session: &ThreadId, peer: &[u8]) -> Result<(), Error> {
        self.store.mark_left(session, peer).await
    }

    async fn reclaim(&self, session: &ThreadId) -> Result<(), Error> {
        self.store.reclaim(session).await
    }

    async fn drop_parcel(&self, session: &ThreadId) -> Result<(), Error> {
        self.store.drop_parcel(session).await
    }

    async fn depart(
        &self,
        session: &ThreadId,
        threads: Vec<TokenThread>,
        destination: &str,
    ) -> Result<(), Error> {
        self.store.depart(session, threads, destination).await
    }

    async fn moved_to(&self, thread: TokenThread) -> Result<Option<String>, Error> {
        self.store.moved_to(thread).await
    }

    async fn parcel_of(&self, thread: &ThreadId) -> Result<Option<ParcelState>, Error> {
        self.store.parcel_of(thread).await
    }

    async fn parcel_root(&self, thread: &ThreadId) -> Result<Option<String>, Error> {
        self.store.parcel_root(thread).await
    }

    async fn moved_thread(&self, token_key: ThreadKey, incarnation: u64) -> Result<Option<ThreadKey>, Error> {
        self.store.moved_thread(token_key, incarnation).await
    }
}
