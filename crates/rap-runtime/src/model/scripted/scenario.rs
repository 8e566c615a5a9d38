//! Scenarios for the scripted model: a file that defines the answer of each turn.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

/// Maximum delay of an answer, in seconds (one day).
const SLEEP_SECONDS: f64 = 86_400.0;

/// Reason why a scenario cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read the script {}: {source}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file does not contain a valid scenario.
    #[error("{}:{line}: {why}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, starting at 1.
        line: usize,
        /// Description of the error.
        why: String,
    },
}

/// The turns of a scenario, in order.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    #[serde(default)]
    repeat: bool,
    #[serde(default, rename = "turn")]
    turns: Vec<Turn>,
}

/// Answer of the model in one turn.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Turn {
    pub say: Option<String>,
    #[serde(default)]
    pub calls: Vec<Call>,
    #[serde(default)]
    pub sleep: Seconds,
}

/// A call of a tool.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Call {
    pub name: String,
    #[serde(default)]
    pub arguments: Map<String, Value>,
}

/// A delay in seconds.
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

    /// Returns a turn by its number, which starts at 1. `None` after the end.
    pub(super) fn turn(&self, turn: u64) -> Option<&Turn> {
        let index = usize::try_from(turn.saturating_sub(1)).unwrap_or(usize::MAX);
        let index = if self.repeat { index.checked_rem(self.turns.len())? } else { index };
        self.turns.get(index)
    }
}
