//! An automaton that reads a history entry by entry, and knows what has to come next.

use std::collections::BTreeMap;

use rap_agent::{Arguments, CallEntry, CallState, Entry, Item, words};
use rap_protocol::CallId;

use crate::simulation::disk::Place;
use crate::simulation::invariants::{Broken, broken, holds};
use crate::simulation::outside::{text_in, word_of};

/// What every schedule says.
pub(in crate::simulation) const TICK: &str = "tick";

/// How far a history was read, and what has to come next.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) read: usize,
    /// Calls of the last assistant entry without a result.
    pub(super) missing: Vec<CallId>,
    /// Every call that the thread can see, with its tool.
    pub(super) seen: BTreeMap<CallId, String>,
    /// What the history shows of each call that was really made.
    pub(super) shown: BTreeMap<CallId, Shown>,
    /// The synthetic call whose result comes next: its original, if it stands for a late result.
    echo: Option<(CallId, Option<CallId>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    Placeholder,
    Interrupted,
    Error,
    Real,
}

impl Reader {
    pub(super) fn take(
        &mut self,
        thread: Place,
        entry: &Entry,
        lives: &BTreeMap<CallId, CallState>,
    ) -> Result<(), Broken> {
        let missing = &self.missing;
        match &entry.item {
            Item::Notice { .. } => {}
            Item::User { text, .. } | Item::Summary { text, .. } => {
                holds!(missing.is_empty(), "I5: {text:?} stands in t{thread} before {missing:?}");
            }
            Item::Assistant { calls, .. } => {
                holds!(missing.is_empty(), "I5: {calls:?} stands in t{thread} before {missing:?}");
                self.echo = None;
                for call in calls {
                    if let Arguments::Echo { .. } = &call.arguments {
                        holds!(calls.len() == 1, "I5: t{thread} has a synthetic call among others");
                        self.take_echo(thread, call)?;
                    }
                    let new = self.seen.insert(call.id.clone(), call.name.clone()).is_none();
                    holds!(new, "I5: t{thread} has two calls {}", call.id);
                }
                self.missing = calls.iter().map(|call| call.id.clone()).collect();
            }
            Item::Result { call_id, content, synthetic, .. } => {
                let Some(at) = missing.iter().position(|call| call == call_id) else {
                    return broken(format!(
                        "I5: t{thread} has a result of {call_id}, missing is {missing:?}"
                    ));
                };
                self.missing.remove(at);
                let text = text_in(content);
                match self.echo.take() {
                    Some((id, Some(of))) if id == *call_id => self.show_late(&of, text)?,
                    Some(_) => {
                        let known =
                            word_of(text).is_some() || text == TICK || text == words::SUBSCRIPTION_LOST;
                        holds!(known, "I8: an event without words: {text:?}");
                    }
                    None if lives.contains_key(call_id) => self.show(call_id, text, *synthetic),
                    None => holds!(*synthetic, "I8: {call_id} was never made and has a result"),
                }
            }
        }
        Ok(())
    }

    /// A synthetic call says which call it stands for, in the exact words.
    fn take_echo(&mut self, thread: Place, call: &CallEntry) -> Result<(), Broken> {
        let Arguments::Echo { of, kind, arguments } = &call.arguments else { return Ok(()) };
        let late = *kind == words::late_kind(of);
        let report = kind.starts_with(&format!("interrupt:{of} (report of thread "));
        let exact = late || report || *kind == words::event_kind(of) || *kind == words::final_kind(of);
        holds!(exact, "I5: t{thread} has a synthetic call of kind {kind}");
        match arguments {
            None => {
                let tool = self.seen.get(of);
                holds!(tool == Some(&call.name), "I5: {of}, echoed in t{thread}, can not be seen there");
            }
            Some(arguments) => {
                let own = arguments.get("of").is_some();
                holds!(own, "I9: the echo of {of} in t{thread} has the arguments {arguments:?}");
            }
        }
        holds!(call.id.as_str().starts_with(words::ID_PREFIX), "I5: {} is not made by the runtime", call.id);
        self.echo = Some((call.id.clone(), late.then(|| of.clone())));
        Ok(())
    }

    fn show(&mut self, call: &CallId, text: &str, synthetic: bool) {
        let shown = match text {
            _ if !synthetic => Shown::Real,
            words::SLEPT | words::ENDED => Shown::Real,
            text if text.starts_with("scheduled") => Shown::Real,
            text if text.starts_with("thread ") && text.contains(" was started") => Shown::Real,
            text if is_refusal(text) => Shown::Interrupted,
            words::STILL_RUNNING => Shown::Placeholder,
            words::INTERRUPTED => Shown::Interrupted,
            _ => Shown::Error,
        };
        self.shown.insert(call.clone(), shown);
    }

    fn show_late(&mut self, of: &CallId, text: &str) -> Result<(), Broken> {
        let shown = self.shown.get(of).copied();
        let next = match (shown, word_of(text)) {
            (Some(Shown::Placeholder | Shown::Error), Some(_)) => Shown::Real,
            (Some(Shown::Placeholder), None) if is_refusal(text) => Shown::Interrupted,
            (Some(Shown::Placeholder), None) => Shown::Error,
            _ => return broken(format!("I6: {text:?} follows for {of}, of which {shown:?} is shown")),
        };
        self.shown.insert(of.clone(), next);
        Ok(())
    }
}

/// Whether a call was not allowed, by a person or by none.
fn is_refusal(text: &str) -> bool {
    text == words::REFUSED || text.starts_with("lapsed: ")
}
