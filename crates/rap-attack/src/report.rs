//! The table of all attempts, and the line at its end.

use crate::attempt::{Outcome, State};

/// Successes of one attempt that are printed.
const SHOWN: usize = 10;
const MIB: u64 = 1024 * 1024;

/// Prints the table and returns the number of attempts that succeeded.
pub(crate) fn print(outcomes: &[Outcome]) -> usize {
    let width = outcomes.iter().map(|outcome| outcome.name.len()).max().unwrap_or_default();
    println!();
    println!(
        "{:12} {:width$} {:>6} {:>9} {:>9} {:>7} {:>9}",
        "topic", "attempt", "tries", "successes", "RSS MiB", "CPU s", "worst ms"
    );
    for outcome in outcomes {
        println!("{:12} {:width$} {}", outcome.topic, outcome.name, columns(outcome));
    }
    let ran = outcomes.iter().filter(|outcome| matches!(outcome.state, State::Ran { .. })).count();
    let succeeded = outcomes.iter().filter(|outcome| !outcome.successes().is_empty()).count();
    println!();
    for outcome in outcomes {
        for what in outcome.successes().iter().take(SHOWN) {
            println!("SUCCESS of {}: {what}", outcome.name);
        }
    }
    if ran < outcomes.len() {
        println!("{} attempts are pending", outcomes.len() - ran);
    }
    // `cargo xtask test` reads this line.
    println!("{ran} attempts, {succeeded} successes");
    succeeded
}

fn columns(outcome: &Outcome) -> String {
    match &outcome.state {
        State::Pending => format!("{:>6}", "pending"),
        State::Ran { tries, cost } => format!(
            "{:>6} {:>9} {:>9} {:>7.1} {:>9}",
            tries.count,
            tries.successes.len(),
            cost.rss / MIB,
            cost.cpu.as_secs_f64(),
            cost.latency.as_millis()
        ),
    }
}
