//! Times of a head that lie too far in the future because the clock was set back.
//!
//! Each step moves them, so that no pause becomes longer than its kind ever is. Schedules are moved when their timer
//! fires or is checked, since only the calendar knows their next time.

use crate::callback::REFUSED_CALLBACK_GRACE;
use crate::head::LONGEST_PAUSE;
use crate::step::StepBuilder;
use crate::{Input, Pause, Phase, Write};

impl StepBuilder<'_> {
    pub(crate) fn correct_times(&mut self, input: &Input) {
        // `Input::Due` ends a pause that has become too long.
        if !matches!(input, Input::Due) {
            self.correct_pause();
        }
        self.correct_calls();
    }

    fn correct_pause(&mut self) {
        if let Phase::Failed { retry_at: Some(at), .. } | Phase::Paused(Pause { until: Some(at), .. }) =
            &mut self.head.phase
        {
            *at = self.now.plus(LONGEST_PAUSE).min(*at);
        }
        if let Some(since) = &mut self.head.held.since {
            *since = self.now.min(*since);
        }
    }

    /// A call that was made in the future begins now. Its stored row keeps its time, which is part of its callback URL.
    fn correct_calls(&mut self) {
        let now = self.now;
        let batch = match &mut self.head.phase {
            Phase::Waiting { batch } => batch.as_mut_slice(),
            _ => &mut [],
        };
        for open in batch.iter_mut().chain(&mut self.head.background) {
            let timer = open.timer();
            let by = open.since.since(now);
            open.since = now.min(open.since);
            open.until = open.until.map(|until| until.minus(by));
            if let Some(problem) = &mut open.problem {
                problem.settle_at = now.plus(REFUSED_CALLBACK_GRACE).min(problem.settle_at);
            }
            if open.timer() != timer {
                self.moved_timers.push(open.id.clone());
            }
        }
    }

    /// Writes the timers that were moved, except those of calls that this step has settled.
    pub(crate) fn write_moved_timers(&mut self) {
        for call in std::mem::take(&mut self.moved_timers) {
            if let Some(open) = self.head.open_call(&call) {
                self.writes.push(Write::Timer { call, at: open.timer() });
            }
        }
    }
}
