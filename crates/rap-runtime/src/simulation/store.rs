//! The real store behind a wrapper: operations take a moment, the process may crash before and after each, and what is
//! read is compared with the model.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Seq, StatusCheck, prompt::seen};
use rap_io::metrics::Exposition;
use rap_protocol::{CallId, ThreadId, Timestamp};

use super::disk::place_of;
use super::invariants::Broken;
use super::state::Sim;
use crate::store::{
    CallRow, Census, Delivery, DeliveryFilter, DeliveryRecord, DuePage, DueWork, Error, HistoryPage,
    InboxItem, Lane, Message, OutboxKey, OutboxMessage, Page, Receipt, Redelivery, SessionKey,
    SessionToolset, SqliteStore, Store, SubscriptionRow, Thread, ThreadFilter, ThreadKey, ThreadRow, Timer,
    TimerRow, ViewRow, Wanted, Work, WorkKey, WorkKind, WorkQueue,
};

pub(super) struct SimStore {
    pub(super) sim: Arc<Sim>,
    pub(super) store: SqliteStore,
}

impl SimStore {
    /// An operation of the store, with a moment before and after it.
    async fn slowly<T>(&self, operation: impl Future<Output = T>) -> T {
        self.sim.wait_here().await;
        let done = operation.await;
        self.sim.wait_here().await;
        done
    }

    /// I9: a model sees the history of its thread up to the question, and nothing else.
    fn shown(&self, thread: &Thread, up_to: Seq, entries: &[Entry]) {
        let mut state = self.sim.state();
        let state = &mut *state;
        let place = place_of(thread.key);
        if let Some(task) = tokio::task::try_id() {
            state.asking.insert(task, (place, up_to));
        }
        let visible: Vec<Entry> = state.disk.visible(place, up_to).into_iter().cloned().collect();
        if state.visitor.is_some() {
            state.show(&visible);
        }
        let expected = seen((1..).zip(visible).collect());
        if expected != entries {
            let at = expected.iter().zip(entries).position(|(one, other)| one != other);
            let differ = at.map(|at| (&entries[at], &expected[at]));
            let text = format!(
                "I9: the model of t{place} is shown {} entries up to {up_to} instead of {}, the first that differ: {differ:?}",
                entries.len(),
                expected.len(),
            );
            state.holds(Err(Broken(text)));
        }
    }
}

#[async_trait]
impl Store for SimStore {
    async fn apply(&self, lane: Lane, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        self.slowly(self.store.apply(lane, messages)).await
    }

    async fn thread(&self, id: &ThreadId) -> Result<ThreadRow, Error> {
        self.slowly(self.store.thread(id)).await
    }

    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error> {
        self.store.threads(filter).await
    }

    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error> {
        self.store.history(thread, page).await
    }

    async fn prompt_entries(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        self.sim.wait_here().await;
        let entries = self.store.prompt_entries(thread, up_to).await?;
        self.shown(thread, up_to, &entries);
        self.sim.wait_here().await;
        Ok(entries)
    }

    async fn entries_since_user(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        self.store.entries_since_user(thread, up_to).await
    }

    async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error> {
        self.store.displays(row).await
    }

    async fn cause(&self, thread: &Thread) -> Result<Cause, Error> {
        self.slowly(self.store.cause(thread)).await
    }

    async fn knows_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error> {
        self.slowly(self.store.knows_call(thread, call)).await
    }

    async fn views(&self, thread: ThreadKey) -> Result<Vec<ViewRow>, Error> {
        self.store.views(thread).await
    }

    async fn inbox(&self, thread: Option<ThreadKey>, wanted: Wanted) -> Result<Page<InboxItem>, Error> {
        self.store.inbox(thread, wanted).await
    }

    async fn calls(&self, wanted: Wanted) -> Result<Page<CallRow>, Error> {
        self.store.calls(wanted).await
    }

    async fn subscriptions(&self, wanted: Wanted) -> Result<Page<SubscriptionRow>, Error> {
        self.store.subscriptions(wanted).await
    }

    async fn timers(&self, wanted: Wanted) -> Result<Page<TimerRow>, Error> {
        self.store.timers(wanted).await
    }

    async fn session_toolsets(&self, session: SessionKey) -> Result<Vec<SessionToolset>, Error> {
        self.slowly(self.store.session_toolsets(session)).await
    }

    async fn toolset(&self, hash: &str) -> Result<Option<Vec<u8>>, Error> {
        self.slowly(self.store.toolset(hash)).await
    }

    async fn newest_toolset(&self, server: &str) -> Result<Option<String>, Error> {
        self.slowly(self.store.newest_toolset(server)).await
    }

    async fn save_toolsets(&self, toolsets: Vec<SessionToolset>) -> Result<(), Error> {
        self.slowly(self.store.save_toolsets(toolsets)).await
    }

    async fn destinations(&self, kind: WorkKind) -> Result<Vec<String>, Error> {
        self.slowly(self.store.destinations(kind)).await
    }

    async fn due_work(&self, queue: &WorkQueue, page: DuePage) -> Result<DueWork, Error> {
        self.slowly(self.store.due_work(queue, page)).await
    }

    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error> {
        self.slowly(self.store.load_work(key, now)).await
    }

    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error> {
        self.slowly(self.store.postpone(key, at, attempts, outcome)).await
    }

    async fn answer_delivered(&self, key: &WorkKey, attempts: u32) -> Result<(), Error> {
        self.slowly(self.store.answer_delivered(key, attempts)).await
    }

    async fn acknowledge(&self, calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Result<(), Error> {
        let known = calls.clone();
        self.sim.wait_here().await;
        let done = self.store.acknowledge(calls, at).await;
        if done.is_ok() {
            let mut state = self.sim.state();
            known.iter().for_each(|(_, call)| state.checker.invocation_recorded(call, at));
        }
        self.sim.wait_here().await;
        done
    }

    async fn record_check(&self, thread: ThreadKey, call: &CallId, check: StatusCheck) -> Result<(), Error> {
        self.sim.wait_here().await;
        let done = self.store.record_check(thread, call, check).await;
        if done.is_ok() {
            self.sim.state().checker.recorded(call, check);
        }
        self.sim.wait_here().await;
        done
    }

    async fn due_messages(
        &self,
        now: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<OutboxMessage>, Error> {
        self.slowly(self.store.due_messages(now, skip, limit)).await
    }

    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error> {
        self.slowly(self.store.due_timers(now, late_after, skip, limit)).await
    }

    async fn put_off(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error> {
        self.slowly(self.store.put_off(timers, messages, now, at)).await
    }

    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error> {
        self.slowly(self.store.next_due(after)).await
    }

    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error> {
        self.slowly(self.store.record_deliveries(records)).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error> {
        self.store.deliveries(filter).await
    }

    async fn delivery(&self, id: &str) -> Result<Option<Delivery>, Error> {
        self.store.delivery(id).await
    }

    async fn redeliver(&self, id: &str, now: Timestamp) -> Result<Redelivery, Error> {
        self.slowly(self.store.redeliver(id, now)).await
    }

    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error> {
        self.slowly(self.store.prune(keys_before, deliveries_before)).await
    }

    async fn census(&self) -> Result<Census, Error> {
        self.store.census().await
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
