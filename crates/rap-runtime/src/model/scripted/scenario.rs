//! A scenario: what a scripted model does in each turn, written in a file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The longest delay of an answer, in seconds: a day.
const SLEEP_SECONDS: f64 = 86_400.0;

/// Why a scenario can not be played.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("can not read the script {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not hold a scenario.
    #[error("{}:{line}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, the first one being 1.
        line: usize,
        /// What is wrong there.
        why: String,
    },
}

/// All turns, in order.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    #[serde(default)]
    repeat: bool,
    #[serde(default, rename = "turn")]
    turns: Vec<Turn>,
}

/// What the model does in one turn.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Turn {
    pub say: Option<String>,
    #[serde(default)]
    pub calls: Vec<Call>,
    #[serde(default)]
    pub sleep: Seconds,
}

/// A call that the model makes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Call {
    pub name: String,
    #[serde(default)]
    pub arguments: Map<String, Value>,
}

/// A delay, given in seconds.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(try_from = "f64")]
pub(super) struct Seconds(pub Duration);

impl TryFrom<f64> for Seconds {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        if !(0.0..=SLEEP_SECONDS).contains(&seconds) {
            return Err(format!("expected 0 to {SLEEP_SECONDS} seconds, found {seconds}"));
        }
        Ok(Seconds(Duration::from_secs_f64(seconds)))
    }
}

impl Scenario {
    pub(super) fn read(path: &Path) -> Result<Scenario, Error> {
        let text =
            fs::read_to_string(path).map_err(|source| Error::Unreadable { path: path.into(), source })?;
        Scenario::parse(path, &text)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Scenario, Error> {
        toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let line = 1 + text.bytes().take(start).filter(|byte| *byte == b'\n').count();
            Error::Malformed { path: path.into(), line, why: error.message().into() }
        })
    }

    /// What happens in this turn of a thread, of which the first is 1.
    pub(super) fn turn(&self, turn: u64) -> Option<&Turn> {
        let index = usize::try_from(turn.saturating_sub(1)).unwrap_or(usize::MAX);
        let index = if self.repeat { index.checked_rem(self.turns.len())? } else { index };
        self.turns.get(index)
    }
}
