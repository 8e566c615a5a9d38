//! A state machine that reads a history entry by entry and knows which entries may come next.

use std::collections::BTreeMap;

use rap_agent::{Arguments, CallEntry, CallState, Entry, Item, texts};
use rap_protocol::CallId;

use crate::simulation::invariants::{Violation, ensure, violation};
use crate::simulation::peers::{tag_of, text_in};
use crate::simulation::reference::ThreadIndex;

/// The text of every schedule.
pub(in crate::simulation) const TICK: &str = "tick";

/// Position in a history, and the state of the calls in it.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) read: usize,
    /// Calls of the last assistant entry that have no result yet.
    pub(super) missing: Vec<CallId>,
    /// All calls in the history, inherited ones included, with the names of their tools.
    pub(super) visible_calls: BTreeMap<CallId, String>,
    /// The last result that the history shows for each call that is not synthetic.
    pub(super) shown: BTreeMap<CallId, ShownResult>,
    /// The synthetic call whose result comes next, and its original call if it stands for a late result.
    echo: Option<(CallId, Option<CallId>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShownResult {
    Placeholder,
    Interrupted,
    Error,
    Real,
}

impl Reader {
    pub(super) fn read_entry(
        &mut self,
        thread: ThreadIndex,
        entry: &Entry,
        call_states: &BTreeMap<CallId, CallState>,
    ) -> Result<(), Violation> {
        let missing = &self.missing;
        match &entry.item {
            Item::Notice { .. } => {}
            Item::User { text, .. } | Item::Summary { text, .. } => {
                ensure!(
                    missing.is_empty(),
                    "I5: {text:?} comes in t{thread} before the results of {missing:?}"
                );
            }
            Item::Assistant { calls, .. } => {
                ensure!(
                    missing.is_empty(),
                    "I5: {calls:?} come in t{thread} before the results of {missing:?}"
                );
                self.echo = None;
                for call in calls {
                    if let Arguments::Synthetic { .. } = &call.arguments {
                        ensure!(calls.len() == 1, "I5: t{thread} has a synthetic call among others");
                        self.read_synthetic_call(thread, call)?;
                    }
                    let new = self.visible_calls.insert(call.id.clone(), call.name.clone()).is_none();
                    ensure!(new, "I5: t{thread} has two calls with the id {}", call.id);
                }
                self.missing = calls.iter().map(|call| call.id.clone()).collect();
            }
            Item::Result { call_id, content, synthetic, .. } => {
                let Some(at) = missing.iter().position(|call| call == call_id) else {
                    return violation(format!(
                        "I5: t{thread} has a result of {call_id}, the missing results are {missing:?}"
                    ));
                };
                self.missing.remove(at);
                let text = text_in(content);
                match self.echo.take() {
                    Some((id, Some(of))) if id == *call_id => self.record_late_result(&of, text)?,
                    Some(_) => {
                        let of_runtime = [TICK, texts::SUBSCRIPTION_LOST, texts::CLOSED_WITHOUT_REPORT];
                        let known = tag_of(text).is_some() || of_runtime.contains(&text);
                        ensure!(known, "I8: an event with unknown text: {text:?}");
                    }
                    None if call_states.contains_key(call_id) => {
                        self.record_result(call_id, text, *synthetic)
                    }
                    None => ensure!(*synthetic, "I8: {call_id} was never made and has a result"),
                }
            }
        }
        Ok(())
    }

    /// Checks that a synthetic call names its original call in the exact format.
    fn read_synthetic_call(&mut self, thread: ThreadIndex, call: &CallEntry) -> Result<(), Violation> {
        let Arguments::Synthetic { of, kind, arguments } = &call.arguments else { return Ok(()) };
        let late = *kind == texts::late_kind(of);
        let report = kind.starts_with(&format!("interrupt:{of} (report of thread "));
        let exact = late || report || *kind == texts::event_kind(of) || *kind == texts::final_kind(of);
        ensure!(exact, "I5: t{thread} has a synthetic call of kind {kind}");
        match arguments {
            None => {
                let tool = self.visible_calls.get(of);
                ensure!(
                    tool == Some(&call.name),
                    "I5: {of}, the original of a synthetic call in t{thread}, is not in its history"
                );
            }
            Some(arguments) => {
                let own = arguments.get("of").is_some();
                ensure!(own, "I9: the synthetic call for {of} in t{thread} has the arguments {arguments:?}");
            }
        }
        ensure!(call.id.as_str().starts_with(texts::ID_PREFIX), "I5: {} is not made by the runtime", call.id);
        self.echo = Some((call.id.clone(), late.then(|| of.clone())));
        Ok(())
    }

    fn record_result(&mut self, call: &CallId, text: &str, synthetic: bool) {
        let shown = match text {
            _ if !synthetic => ShownResult::Real,
            texts::SLEEP_OVER | texts::SLEEP_ENDED_EARLY => ShownResult::Real,
            text if text.starts_with("scheduled") => ShownResult::Real,
            text if text.starts_with("thread ") && text.contains(" was started") => ShownResult::Real,
            text if is_refusal(text) => ShownResult::Interrupted,
            texts::STILL_RUNNING | texts::AWAITS_APPROVAL => ShownResult::Placeholder,
            texts::INTERRUPTED => ShownResult::Interrupted,
            _ => ShownResult::Error,
        };
        self.shown.insert(call.clone(), shown);
    }

    fn record_late_result(&mut self, of: &CallId, text: &str) -> Result<(), Violation> {
        let shown = self.shown.get(of).copied();
        let next = match (shown, tag_of(text)) {
            (Some(ShownResult::Placeholder | ShownResult::Error), Some(_)) => ShownResult::Real,
            (Some(ShownResult::Placeholder), None) if is_refusal(text) => ShownResult::Interrupted,
            (Some(ShownResult::Placeholder), None) => ShownResult::Error,
            _ => return violation(format!("I6: a late result {text:?} of {of} follows {shown:?}")),
        };
        self.shown.insert(of.clone(), next);
        Ok(())
    }
}

/// Returns whether a result says that a person refused the call, or that nobody approved it in time.
fn is_refusal(text: &str) -> bool {
    text == texts::REFUSED || text.starts_with("not approved: ")
}
