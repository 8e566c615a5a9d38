//! Statistics of agents over time, in intervals of ten minutes. They are counted in memory and written after a short
//! pause; nothing waits for them. What was counted since the last write is lost if the process is killed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rap_protocol::Timestamp;
use tokio::sync::Notify;

use super::Engine;
use crate::model::{self, ModelAnswer};
use crate::store::{Figures, FiguresRow, PART, Thread};

/// Time that figures wait before they are written together. Short, so that an idle runtime writes nothing.
const PAUSE: Duration = Duration::from_millis(200);
/// Maximum number of pairs of agent and interval that wait to be written. More are dropped.
const MAX_PENDING: usize = 1024;

#[derive(Default)]
pub(super) struct PendingFigures {
    rows: Mutex<HashMap<(Timestamp, String), Figures>>,
    due: Notify,
}

impl PendingFigures {
    fn rows(&self) -> MutexGuard<'_, HashMap<(Timestamp, String), Figures>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, at: Timestamp, agent: &str, figures: &Figures) {
        let mut rows = self.rows();
        let key = (at, agent.to_owned());
        if rows.len() < MAX_PENDING || rows.contains_key(&key) {
            rows.entry(key).or_default().add(figures);
            self.due.notify_one();
        }
    }
}

impl Engine {
    /// Returns the start of the interval that figures of this moment belong to.
    fn current_part(&self) -> Timestamp {
        let (now, part) = (self.now().0, PART.as_millis() as i64);
        Timestamp(now - now.rem_euclid(part))
    }

    pub(super) fn count_wake(&self, thread: &Thread, woken: bool) {
        if woken {
            let woken = Figures { wakes: 1, ..Figures::default() };
            self.figures.add(self.current_part(), &thread.agent, &woken);
        }
    }

    /// Counts a request to a model.
    pub(super) fn count_request(
        &self,
        agent: &str,
        elapsed: Duration,
        answer: &Result<ModelAnswer, model::Error>,
    ) {
        let model_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let (usage, failures) = match answer {
            Ok(answer) => (answer.usage, 0),
            Err(_) => (model::Usage::default(), 1),
        };
        let model::Usage { input, output, cached, cost, .. } = usage;
        let turns = 1 - failures;
        let figures = Figures { wakes: 0, turns, failures, model_ms, input, output, cached, cost };
        self.figures.add(self.current_part(), agent, &figures);
    }

    /// Counts the tokens of a request to the model that is not a turn: a summary, or a request without an answer.
    pub(super) fn count_tokens(&self, agent: &str, usage: &model::Usage) {
        let model::Usage { input, output, cached, cost, .. } = *usage;
        let figures = Figures { input, output, cached, cost, ..Figures::default() };
        self.figures.add(self.current_part(), agent, &figures);
    }

    /// Writes figures until the runtime stops.
    pub(super) async fn record_figures(self: Arc<Self>) {
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return self.write_figures().await,
                () = self.figures.due.notified() => {}
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(PAUSE) => {}
            }
            self.write_figures().await;
        }
    }

    async fn write_figures(&self) {
        let rows = std::mem::take(&mut *self.figures.rows());
        if rows.is_empty() {
            return;
        }
        let rows: Vec<_> =
            rows.into_iter().map(|((at, agent), figures)| FiguresRow { at, agent, figures }).collect();
        if let Err(error) = self.store.add_figures(rows.clone(), self.now()).await {
            tracing::debug!(why = error.with_sources(), "figures could not be written");
            for FiguresRow { at, agent, figures } in rows {
                self.figures.add(at, &agent, &figures);
            }
        }
    }
}
