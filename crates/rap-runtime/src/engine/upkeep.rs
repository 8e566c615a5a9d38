//! Upkeep: reads from the tables what is due and not under way. It is also how a runtime takes up its work after a
//! start, however the last one ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use rap_agent::Message;
use rap_protocol::retry::{Attempt, Next, Outcome, Patience, after_attempt};
use rap_protocol::{ChoiceAnswer, Timestamp};
use rusqlite::params;

use super::{Engine, STORE_PAUSE};
use crate::store::{self, DueAnswer, now, random};

/// How much of each kind is read at a time. More than can be under way, so that what is under way hides nothing.
const AT_A_TIME: usize = 2048;
/// How long upkeep sleeps when nothing is due.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// How often old marks of events are removed.
const PRUNE_EVERY: Duration = Duration::from_secs(600);
/// How many of them at a time.
const PRUNE_ROWS: i64 = 10_000;

impl Engine {
    pub(super) async fn upkeep(self: Arc<Self>) {
        let mut prune_at = now().plus(PRUNE_EVERY);
        // The first time everything is looked for.
        self.overflow.store(true, Ordering::Relaxed);
        loop {
            // Whatever becomes due from now on may be missed by this look, and pokes.
            self.sweeps_at.store(i64::MAX, Ordering::SeqCst);
            let pause = match self.sweep().await {
                Ok(next) => next.map_or(LONGEST_SLEEP, |next| next.since(now())).min(LONGEST_SLEEP),
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(%error, "upkeep could not be done");
                    self.leave_for_later();
                    STORE_PAUSE.1
                }
            };
            if prune_at <= now() {
                self.prune().await;
                prune_at = now().plus(PRUNE_EVERY);
            }
            self.sweeps_at.store(now().plus(pause).0, Ordering::SeqCst);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.poke.notified() => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Begins everything that is due; gives the time at which something else will be.
    async fn sweep(self: &Arc<Self>) -> Result<Option<Timestamp>, store::Error> {
        let at = now();
        if self.overflow.swap(false, Ordering::Relaxed) {
            for (thread, turn, up_to) in self.store.asks(AT_A_TIME).await? {
                self.start_asking(&thread, turn, up_to);
            }
        }
        for due in self.store.due_invocations(at, AT_A_TIME).await? {
            self.start_invoking(&due.thread, due.call, due.arguments, due.attempts);
        }
        for letter in self.store.letters(AT_A_TIME).await? {
            self.store.deliver(letter).await?;
        }
        for thread in self.store.due_threads(at, AT_A_TIME).await? {
            self.insist(thread, Message::Due).await.ok();
        }
        for (thread, call) in self.store.timed_out(at, AT_A_TIME).await? {
            self.insist(thread, Message::TimedOut { call }).await.ok();
        }
        for answer in self.store.due_answers(at, AT_A_TIME).await? {
            self.start_answering(answer);
        }
        self.store.next_due(at).await
    }

    /// A person's answer goes to the tool that asked, at least once.
    fn start_answering(self: &Arc<Self>, answer: DueAnswer) {
        if !self.underway.begin_answer(answer.thread.no, answer.no) {
            return;
        }
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            engine.answer(&answer).await;
            engine.underway.end_answer(answer.thread.no, answer.no);
            engine.poke.notify_one();
        });
    }

    async fn answer(&self, answer: &DueAnswer) {
        let body = ChoiceAnswer { id: answer.call.clone(), selected: answer.selected };
        let body = Bytes::from(serde_json::to_vec(&body).expect("bug: an answer is JSON"));
        let sent = self.invoker.post_json(&answer.response_url.to_url(), &[], body).await;
        let outcome = match &sent {
            Ok(reply) => Outcome::Answered { status: reply.status, retry_after: reply.retry_after },
            Err(_) => Outcome::NoAnswer,
        };
        let number = answer.attempts.saturating_add(1);
        let attempt = Attempt { number, since: answer.since, now: now(), dice: random() as u32 };
        let patience =
            Patience { give_up_after: self.settings.limits.invoke_retry_for, ..Patience::INVOCATION };
        let why = match after_attempt(outcome, attempt, &patience) {
            Next::Done => return self.note_answer(answer, None, number).await,
            Next::Again { at } => return self.note_answer(answer, Some(at), number).await,
            Next::Refused { status } => format!("answered {status}"),
            Next::GaveUp => format!("no success in {number} attempts"),
        };
        let text = format!("Error: the user's answer could not be delivered to the tool: {why}");
        self.note_answer(answer, None, number).await;
        self.insist(answer.thread.no, Message::CallFailed { call: answer.call.clone(), text }).await.ok();
    }

    async fn note_answer(&self, answer: &DueAnswer, again: Option<Timestamp>, attempts: u32) {
        let (thread, no) = (answer.thread.no, answer.no);
        let noted = self.store.write(move |conn| {
            let sql = "UPDATE questions SET answer_at = ?3, attempts = ?4 WHERE thread = ?1 AND no = ?2";
            let row = params![thread, no.cast_signed(), again.map(|at| at.0), attempts];
            conn.prepare_cached(sql)?.execute(row)
        });
        if let Err(error) = noted.await {
            tracing::warn!(%error, "the delivery of an answer could not be noted");
            tokio::time::sleep(STORE_PAUSE.1).await;
        }
    }

    /// Marks of events are kept for a time only.
    async fn prune(&self) {
        let before = now().minus(self.settings.limits.event_marks_for);
        let pruned = self.store.write(move |conn| {
            let mut statement = conn.prepare_cached(
                "DELETE FROM seen WHERE (thread, call, event) IN \
                 (SELECT thread, call, event FROM seen WHERE at < ?1 ORDER BY at LIMIT ?2)",
            )?;
            statement.execute(params![before.0, PRUNE_ROWS])
        });
        if let Err(error) = pruned.await {
            tracing::warn!(%error, "old marks of events could not be removed");
        }
    }
}
