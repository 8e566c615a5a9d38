//! Recognises backtraces of Rust, Python, Java and JavaScript in text.

use std::ops::Range;

/// Replacement of a backtrace.
pub(super) const REMOVED: &str = "[backtrace removed]";

/// Beginning of a backtrace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// A headline, with frames below it.
    Headline(Language),
    /// The first frame.
    Frame,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Language {
    Rust,
    Python,
}

impl Start {
    /// Texts in the first line of a backtrace.
    pub(super) const PATTERNS: &[(&'static str, Start)] = &[
        ("stack backtrace:", Start::Headline(Language::Rust)),
        ("Stack backtrace:", Start::Headline(Language::Rust)),
        ("Traceback (most recent call last):", Start::Headline(Language::Python)),
        ("   0: ", Start::Frame),
        ("    at ", Start::Frame),
        ("\tat ", Start::Frame),
    ];
}

/// Returns the backtrace whose first line contains a pattern at `at`, without the line break at its end.
pub(super) fn find(text: &str, at: usize, start: Start) -> Option<Range<usize>> {
    // Only white space may be in front.
    let begin = text[..at].trim_end_matches([' ', '\t']).len();
    if begin > 0 && !text[..begin].ends_with('\n') {
        return None;
    }
    let frames = match start {
        Start::Headline(_) => at + text[at..].find('\n')? + 1,
        Start::Frame => begin,
    };
    let (mut end, mut convincing, mut last) = (frames, start != Start::Frame, None);
    for line in text[frames..].split_inclusive('\n') {
        let number = frame_number(line);
        // Frame numbers have to increase. Otherwise a text with many first frames would be read to its end for each of
        // them.
        let is_frame = match start {
            Start::Headline(Language::Python) => line.starts_with("  "),
            _ => number > last || has_location(line),
        };
        if !is_frame {
            break;
        }
        end += line.len();
        last = number.max(last);
        convincing |= line.contains("::") || has_location(line);
    }
    let block = text[begin..end].trim_end_matches(['\n', '\r']);
    (end > frames && convincing).then(|| begin..begin + block.len())
}

/// Returns 12 for `  12: app::main`.
fn frame_number(line: &str) -> Option<u32> {
    let (number, _) = line.strip_prefix("  ")?.trim_start().split_once(": ")?;
    number.parse().ok()
}

/// Recognises `    at src/main.rs:3:5`, `\tat com.example.A.b(A.java:12)` and `    at f (a.js:1:2)`.
fn has_location(line: &str) -> bool {
    let Some(place) = line.trim().strip_prefix("at ") else { return false };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let by_line = place.rsplit_once(':').is_some_and(|(_, line)| is_number(line));
    line.starts_with([' ', '\t']) && (by_line || place.ends_with(')') && place.contains('('))
}
