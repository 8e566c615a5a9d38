//! Upkeep: reads from the tables what is due and not under way. It is also how a runtime takes up its work after a
//! start, however the last one ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use rap_agent::Message;
use rap_io::writer::Lane;
use rap_protocol::retry::{Attempt, Next, Outcome, Patience, after_attempt};
use rap_protocol::{ChoiceAnswer, Timestamp};
use rusqlite::params;

use super::{Engine, STORE_PAUSE, Source};
use crate::store::{self, DueAnswer, Target, now, random};

/// How much of each kind is read at a time. More than can be under way, so that what is under way hides nothing.
const AT_A_TIME: usize = 2048;
/// How long upkeep sleeps when nothing is due.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// The pause before the rest of more than that.
const NEXT_PAGE: Duration = Duration::from_millis(50);
/// How often old marks of events are removed.
const PRUNE_EVERY: Duration = Duration::from_secs(600);
/// How many of them at a time.
const PRUNE_ROWS: i64 = 10_000;

impl Engine {
    pub(super) async fn upkeep(self: Arc<Self>) {
        let mut prune_at = now().plus(PRUNE_EVERY);
        // The first time everything is looked for.
        self.overflow.store(true, Ordering::SeqCst);
        loop {
            // Whatever becomes due from now on may be missed by this look, and pokes.
            self.sweeps_at.store(i64::MAX, Ordering::SeqCst);
            let pause = match self.sweep().await {
                Ok(next) => next.map_or(LONGEST_SLEEP, |next| next.since(now())).min(LONGEST_SLEEP),
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(%error, "upkeep could not be done");
                    self.overflow.store(true, Ordering::SeqCst);
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
        if self.overflow.swap(false, Ordering::SeqCst) {
            for (thread, turn, up_to) in self.store.asks(AT_A_TIME).await? {
                self.start_asking(&thread, turn, up_to, Source::Table { attempts: 0 });
            }
        }
        for due in self.store.due_invocations(at, AT_A_TIME).await? {
            let source = Source::Table { attempts: due.attempts };
            self.start_invoking(&due.thread, due.call, due.arguments, source);
        }
        for answer in self.store.due_answers(at, AT_A_TIME).await? {
            self.start_answering(answer);
        }
        if self.fire(at).await? >= AT_A_TIME {
            // There may be more of it.
            return Ok(Some(at.plus(NEXT_PAGE)));
        }
        self.store.next_due(at).await
    }

    /// Delivers letters and fires timers; how many there were of the kind that has most. They share commits, and one
    /// that fails keeps no other from its turn: it is still due, and tried again.
    async fn fire(&self, at: Timestamp) -> Result<usize, store::Error> {
        let letters = self.store.letters(AT_A_TIME).await?;
        let due = self.store.due_threads(at, AT_A_TIME).await?;
        let late = self.store.timed_out(at, AT_A_TIME).await?;
        let most = letters.len().max(due.len()).max(late.len());
        let mut ended = join_all(letters.into_iter().map(|letter| self.store.deliver(letter))).await;
        let due = due.into_iter().map(|thread| (thread, Message::Due));
        let late = late.into_iter().map(|(thread, call)| (thread, Message::TimedOut { call }));
        let step = |(thread, message)| async move {
            self.store.step(Lane::Internal, Target::No(thread), message).await.map(|_| ())
        };
        ended.extend(join_all(due.chain(late).map(step)).await);
        let failed = |ended: Result<(), store::Error>| {
            use store::Error::{Ignored, NoThread, SetAside};
            ended.err().filter(|error| !matches!(error, Ignored(_) | NoThread | SetAside))
        };
        match ended.into_iter().find_map(failed) {
            Some(error) => Err(error),
            None => Ok(most),
        }
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
        // In this order: between the two the answer would be neither due nor failed.
        self.insist(answer.thread.no, Message::CallFailed { call: answer.call.clone(), text }).await.ok();
        self.note_answer(answer, None, number).await;
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

    /// Marks of events and of clients' requests are kept for a time only.
    async fn prune(&self) {
        let before = now().minus(self.settings.limits.event_marks_for);
        let pruned = self.store.write(move |conn| {
            let mut statement = conn.prepare_cached(
                "DELETE FROM seen WHERE (thread, call, event) IN \
                 (SELECT thread, call, event FROM seen WHERE at < ?1 ORDER BY at LIMIT ?2)",
            )?;
            statement.execute(params![before.0, PRUNE_ROWS])?;
            let mut statement = conn.prepare_cached(
                "DELETE FROM repeats WHERE digest IN \
                 (SELECT digest FROM repeats WHERE at < ?1 ORDER BY at LIMIT ?2)",
            )?;
            statement.execute(params![before.0, PRUNE_ROWS])
        });
        if let Err(error) = pruned.await {
            tracing::warn!(%error, "old marks of events could not be removed");
        }
    }
}
