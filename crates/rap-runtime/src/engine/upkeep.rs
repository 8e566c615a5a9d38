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
use crate::store::{self, DueAnswer, Fate, Kind, Line, Target, now, prune_old, random};

/// How much of each kind is read at a time, besides what can be under way and would hide the rest.
const AT_A_TIME: usize = 2048;
/// How long upkeep sleeps when nothing is due.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// The pause before the rest of more than that.
const NEXT_PAGE: Duration = Duration::from_millis(50);
/// How often what is kept for a time only is removed.
const PRUNE_EVERY: Duration = Duration::from_secs(600);
/// How many of them at a time, and the pause before the rest of more than that.
const PRUNE_ROWS: usize = 10_000;
const PRUNE_PAUSE: Duration = Duration::from_secs(1);
/// The longest time that a call has after a start if its own time was over before. A shorter time-out is enough.
const GRACE: Duration = Duration::from_secs(30);

impl Engine {
    pub(super) async fn upkeep(self: Arc<Self>) {
        let began = now();
        let mut prune_at = began.plus(PRUNE_EVERY);
        // The first time everything is looked for.
        self.overflow.store(true, Ordering::SeqCst);
        loop {
            // Whatever becomes due from now on may be missed by this look, and pokes.
            self.sweeps_at.store(i64::MAX, Ordering::SeqCst);
            let pause = match self.sweep(began).await {
                Ok(next) => next.map_or(LONGEST_SLEEP, |next| next.since(now())).min(LONGEST_SLEEP),
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(%error, "upkeep could not be done");
                    self.overflow.store(true, Ordering::SeqCst);
                    STORE_PAUSE.1
                }
            };
            if prune_at <= now() {
                prune_at = now().plus(self.prune().await);
            }
            let pause = pause.min(prune_at.since(now()));
            self.sweeps_at.store(now().plus(pause).0, Ordering::SeqCst);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.poke.notified() => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Begins everything that is due; gives the time at which something else will be.
    async fn sweep(self: &Arc<Self>, began: Timestamp) -> Result<Option<Timestamp>, store::Error> {
        let at = now();
        if self.overflow.swap(false, Ordering::SeqCst) {
            let under_way = self.settings.limits.model_concurrency;
            for (thread, turn, up_to) in self.store.asks(AT_A_TIME.saturating_add(under_way)).await? {
                self.start_asking(&thread, turn, up_to, Source::Table { attempts: 0 });
            }
        }
        let under_way = self.settings.limits.invoke_concurrency.saturating_mul(self.invoke_places.len());
        for due in self.store.due_invocations(at, AT_A_TIME.saturating_add(under_way)).await? {
            let source = Source::Table { attempts: due.attempts };
            self.start_invoking(&due.thread, due.call, due.arguments, source);
        }
        for answer in self.store.due_answers(at, AT_A_TIME).await? {
            self.start_answering(answer);
        }
        // Results that could not be delivered while we were down are on their way.
        let grace = began.plus(self.settings.limits.thread.call_timeout.unwrap_or(GRACE).min(GRACE));
        let (late_after, again) = if at < grace { (began, Some(grace)) } else { (Timestamp(i64::MIN), None) };
        if self.fire(at, late_after).await? >= AT_A_TIME {
            // There may be more of it.
            return Ok(Some(at.plus(NEXT_PAGE)));
        }
        Ok([self.store.next_due(at).await?, again].into_iter().flatten().min())
    }

    /// Delivers letters and fires timers; how many there were of the kind that has most. They share commits, and one
    /// that fails keeps no other from its turn: it is still due, and tried again.
    async fn fire(&self, at: Timestamp, late_after: Timestamp) -> Result<usize, store::Error> {
        let letters = self.store.letters(AT_A_TIME).await?;
        let due = self.store.due_threads(at, AT_A_TIME).await?;
        let late = self.store.timed_out(late_after, at, AT_A_TIME).await?;
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
        // What was read may be old: an answer that was delivered since would be refused now, and its call fail for it.
        let due = self.store.is_answer_due(answer.thread.no, answer.no, answer.attempts, now()).await;
        if !matches!(due, Ok(true)) {
            return;
        }
        let body = ChoiceAnswer { id: answer.call.clone(), selected: answer.selected };
        let body = Bytes::from(serde_json::to_vec(&body).expect("bug: an answer is JSON"));
        let sent = self.invoker.post_json(&answer.response_url.to_url(), &[], body).await;
        let (outcome, detail) = match &sent {
            Ok(reply) => (
                Outcome::Answered { status: reply.status, retry_after: reply.retry_after },
                format!("answered {}", reply.status),
            ),
            Err(error) => (Outcome::NoAnswer, error.to_string()),
        };
        let number = answer.attempts.saturating_add(1);
        let attempt = Attempt { number, since: answer.since, now: now(), dice: random() as u32 };
        let patience =
            Patience { give_up_after: self.settings.limits.invoke_retry_for, ..Patience::INVOCATION };
        let next = after_attempt(outcome, attempt, &patience);
        let fate = Fate::of(next);
        self.ended(Kind::Answer, fate, number, || Line {
            kind: Kind::Answer,
            thread: answer.thread.no,
            thread_id: Some(answer.thread.id.clone()),
            call: Some(answer.call.clone()),
            server: None,
            topic: answer.no.to_string(),
            outcome: fate,
            attempts: number,
            detail,
            at: now(),
        });
        let why = match next {
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

    /// Marks of events and of clients' requests, and the ledger, are kept for a time only. Gives the pause until the next time.
    async fn prune(&self) -> Duration {
        let before = now().minus(self.settings.limits.event_marks_for);
        let pruned = self.store.write(move |conn| {
            let mut statement = conn.prepare_cached(
                "DELETE FROM seen WHERE (thread, call, event) IN \
                 (SELECT thread, call, event FROM seen WHERE at < ?1 ORDER BY at LIMIT ?2)",
            )?;
            let seen = statement.execute(params![before.0, PRUNE_ROWS as i64])?;
            prune_old(conn, now())?;
            let mut statement = conn.prepare_cached(
                "DELETE FROM repeats WHERE digest IN \
                 (SELECT digest FROM repeats WHERE at < ?1 ORDER BY at LIMIT ?2)",
            )?;
            Ok(seen.max(statement.execute(params![before.0, PRUNE_ROWS as i64])?))
        });
        match pruned.await {
            Ok(rows) if rows >= PRUNE_ROWS => PRUNE_PAUSE,
            Ok(_) => PRUNE_EVERY,
            Err(error) => {
                tracing::warn!(%error, "what is old could not be removed");
                PRUNE_EVERY
            }
        }
    }
}
