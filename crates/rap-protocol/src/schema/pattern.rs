//! Regular expressions with bounded cost.
//!
//! A pattern first runs as a lazily built automaton, at a constant cost per byte. If that would need too many states, it
//! runs as a set of states, at a cost per byte and state. Both are paid before they run.

use std::collections::HashMap;

use regex_automata::Input;
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::pikevm::PikeVM;
use regex_automata::nfa::thompson::{Compiler, Config, WhichCaptures};

use super::budget::{Budget, Stop};
use crate::limits;

/// Maximum size of the states that an automaton keeps, in bytes.
const CACHE_BYTES: usize = 256 * 1024;
/// Maximum number of automata that keep their states during one validation.
const CACHES: usize = 16;
/// Number of bytes that an automaton reads in one step.
const BYTES_PER_STEP: u64 = 4;

pub(super) struct Pattern {
    pub(super) text: String,
    states: u64,
    vm: PikeVM,
    automaton: Option<DFA>,
}

/// States of the automata during one validation, by number of the pattern.
#[derive(Default)]
pub(super) struct Caches(HashMap<usize, Cache>);

impl Pattern {
    pub(super) fn new(text: &str) -> Result<Self, String> {
        let unsupported =
            || "not a regular expression, or one with look-around or back-references".to_owned();
        let rust = jsonschema_regex::to_rust_regex(text).map_err(|()| unsupported())?;
        let config =
            Config::new().nfa_size_limit(Some(limits::PATTERN_BYTES)).which_captures(WhichCaptures::Implicit);
        let nfa =
            Compiler::new().configure(config).build(&rust).map_err(|error| match error.size_limit() {
                Some(most) => format!("a pattern that needs more than {most} bytes"),
                None => unsupported(),
            })?;
        let states = nfa.states().len();
        let config = DFA::config()
            .cache_capacity(CACHE_BYTES)
            .skip_cache_capacity_check(true)
            .minimum_cache_clear_count(Some(2))
            // A new state costs time in proportion to the states of the pattern, so this makes the time linear.
            .minimum_bytes_per_state(Some(states))
            .unicode_word_boundary(true);
        let automaton = DFA::builder().configure(config).build_from_nfa(nfa.clone()).ok();
        let vm = PikeVM::new_from_nfa(nfa).map_err(|_| unsupported())?;
        Ok(Pattern { text: text.to_owned(), states: states as u64, vm, automaton })
    }

    /// Returns the size of the compiled pattern, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.vm.get_nfa().memory_usage()
    }

    /// Returns true if the pattern, whose number is `number`, matches somewhere in a text.
    pub(super) fn is_match(
        &self,
        number: usize,
        text: &str,
        caches: &mut Caches,
        budget: &mut Budget,
    ) -> Result<bool, Stop> {
        let bytes = text.len() as u64;
        if let Some(automaton) = &self.automaton {
            budget.spend(1 + bytes / BYTES_PER_STEP)?;
            let cache = caches.of(number, automaton, self.states, budget)?;
            if let Ok(found) = automaton.try_search_fwd(cache, &Input::new(text).earliest(true)) {
                return Ok(found.is_some());
            }
        }
        budget.spend(self.states.saturating_mul(bytes + 1))?;
        Ok(self.vm.is_match(&mut self.vm.create_cache(), text))
    }
}

impl Caches {
    fn of(
        &mut self,
        number: usize,
        automaton: &DFA,
        states: u64,
        budget: &mut Budget,
    ) -> Result<&mut Cache, Stop> {
        if !self.0.contains_key(&number) {
            budget.spend(states + 64)?;
            if self.0.len() == CACHES {
                self.0.clear();
            }
        }
        Ok(self.0.entry(number).or_insert_with(|| automaton.create_cache()))
    }
}
