//! Checks at the end of all attempts: the servers stop in time, and no log contains a secret.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rap_testkit::{Process, poll};

use crate::attempt::{Cost, Outcome, Tries};
use crate::stage::Stage;

/// Time within which a server stops, whatever it was doing.
const STOPPED_WITHIN: Duration = Duration::from_secs(5);
/// Part of a callback token that is random enough to be recognised, in characters.
const TOKEN_PART: usize = 32;

/// Characters that no log may contain, since they would change what an operator sees.
const DECEIVING: [&str; 6] = ["\u{1b}", "\u{9b}", "\u{202e}", "\u{200b}", "\u{2028}", "\u{e0041}"];

pub(crate) async fn check(stages: &[Arc<Stage>]) -> Vec<Outcome> {
    let stopped = stop(stages).await;
    let logs: Vec<(String, String)> =
        processes(stages).map(|process| (process.url.clone(), process.log())).collect();
    let secrets: Vec<String> = stages.iter().flat_map(|stage| stage.secrets()).collect();
    vec![
        outcome("stop while the attacks go on", stopped),
        outcome("secrets in logs", search(&logs, &secrets)),
        outcome("deceiving characters in logs", search(&logs, &DECEIVING.map(str::to_owned))),
    ]
}

fn processes(stages: &[Arc<Stage>]) -> impl Iterator<Item = &Process> {
    stages.iter().flat_map(|stage| stage.targets()).flat_map(|target| target.processes())
}

fn outcome(name: &'static str, tries: Tries) -> Outcome {
    Outcome { name, topic: "end", tries, cost: Cost::default() }
}

/// Stops all servers at the same time.
async fn stop(stages: &[Arc<Stage>]) -> Tries {
    let mut tries = Tries::new();
    let processes: Vec<&Process> = processes(stages).collect();
    let (slowdown, began) = (crate::watch::slowdown().await, Instant::now());
    processes.iter().for_each(|process| process.signal("TERM"));
    let have_stopped = async || !processes.iter().any(|process| process.is_running());
    let _stopped = poll(STOPPED_WITHIN * slowdown, have_stopped).await;
    for process in processes {
        let what = format!("{} did not stop within {} s", process.url, STOPPED_WITHIN.as_secs());
        tries.add(what, process.is_running());
    }
    tries.note = Some(format!("{:.1} s", began.elapsed().as_secs_f64()));
    tries
}

/// Searches logs for texts and, if they are long, for their middle.
fn search(logs: &[(String, String)], texts: &[String]) -> Tries {
    let mut tries = Tries::new();
    for (url, log) in logs {
        for text in texts {
            let part = match text.len() {
                0..=TOKEN_PART => text,
                length => text.get((length - TOKEN_PART) / 2..(length + TOKEN_PART) / 2).unwrap_or(text),
            };
            let found = log.lines().find(|line| line.contains(part));
            let what = found.map(|line| line.chars().take(300).collect::<String>()).unwrap_or_default();
            tries.add(format!("the log of {url} contains {text:?}: {what:?}"), found.is_some());
        }
    }
    tries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_or_the_middle_of_it_is_found_in_a_log() {
        let secret = format!("{}{}{}", "a".repeat(40), "0123456789abcdef".repeat(2), "b".repeat(40));
        let log = |text: &str| vec![("server".to_owned(), format!("first line\n{text}\nlast line"))];
        let found = |text: &str| search(&log(text), &[secret.clone(), "short".to_owned()]).successes.len();
        assert_eq!(found("nothing"), 0);
        assert_eq!(found("token=short"), 1);
        assert_eq!(found(&format!("a path /callback/{secret}")), 1);
        assert_eq!(found(&format!("cut: {}", &secret[30..80])), 1);
    }
}
