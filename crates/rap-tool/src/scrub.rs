//! Removes the usual leaks from the output of tools: paths of this machine's home and temporary directories, values of
//! secret environment variables, and backtraces.
//!
//! One pass of an Aho-Corasick automaton finds everything, whatever the number of secrets. Large output is scrubbed on a
//! thread for blocking work.

mod backtrace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, Input, MatchKind};
use rap_protocol::Secret;
use serde_json::Value;

/// Size up to which output is scrubbed on the thread of its handler, in bytes. That takes less than a millisecond.
const INLINE_BYTES: usize = 128 * 1024;

/// Minimum length of a secret, in bytes. A shorter one would occur in output by chance.
const MIN_SECRET_BYTES: usize = 8;

/// Maximum length of a secret, in bytes. Only the beginning of a longer one is found.
const MAX_SECRET_BYTES: usize = 8 * 1024;

/// Maximum number of secrets.
const MAX_SECRETS: usize = 512;

/// Parts of the names of environment variables whose values are secret.
const SECRET_NAMES: &[&str] =
    &["SECRET", "TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "API_KEY", "APIKEY", "BEARER"];

/// Endings of such names.
const SECRET_ENDINGS: &[&str] = &["_KEY", "_KEY_ID", "_PASS", "_PWD", "_DSN", "DATABASE_URL", "_AUTH"];

const SECRET: &str = "[secret]";
const HOME: &str = "~";
const TEMP: &str = "[temp]";

/// Finds and replaces text that must not leave this machine.
pub(crate) struct Scrubber {
    automaton: AhoCorasick,
    /// The meaning of each pattern.
    found: Vec<Found>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Secret,
    /// A directory, and what replaces it.
    Directory(&'static str),
    Backtrace(backtrace::Start),
}

/// Directories, variables and secrets from which the patterns are made.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) home: Vec<PathBuf>,
    pub(crate) temp: Vec<PathBuf>,
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Secrets of the server itself.
    pub(crate) secrets: Vec<Secret>,
}

impl Sources {
    /// Returns the directories and the environment of this process.
    pub(crate) fn of_this_process(secrets: Vec<Secret>) -> Self {
        let with_target = |path: PathBuf| {
            let target = path.canonicalize().ok().filter(|target| *target != path);
            std::iter::once(path).chain(target)
        };
        let temp = [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into()];
        Sources {
            home: std::env::home_dir().into_iter().flat_map(with_target).collect(),
            temp: temp.into_iter().flat_map(with_target).collect(),
            environment: std::env::vars_os().collect(),
            secrets,
        }
    }
}

impl Scrubber {
    pub(crate) fn new(sources: Sources) -> Self {
        let mut patterns: Vec<(String, Found)> = Vec::new();
        for secret in secrets(&sources) {
            // In JSON text, a secret with quotes or line breaks looks different.
            let escaped = serde_json::to_string(&secret).unwrap_or_default();
            let escaped = escaped.trim_start_matches('"').strip_suffix('"').unwrap_or_default().to_owned();
            if escaped != secret && escaped.len() >= MIN_SECRET_BYTES {
                patterns.push((escaped, Found::Secret));
            }
            patterns.push((secret, Found::Secret));
        }
        let directories = [(sources.home, HOME), (sources.temp, TEMP)];
        for (path, replacement) in
            directories.into_iter().flat_map(|(paths, with)| paths.into_iter().map(move |path| (path, with)))
        {
            let path = path.to_string_lossy().trim_end_matches('/').to_owned();
            if path.starts_with('/') {
                patterns.push((path, Found::Directory(replacement)));
            }
        }
        let starts = backtrace::Start::PATTERNS.iter();
        patterns.extend(starts.map(|(text, start)| ((*text).to_owned(), Found::Backtrace(*start))));
        let (texts, found): (Vec<String>, Vec<Found>) = patterns.into_iter().unzip();
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts);
        let automaton = automaton.expect("bug: the patterns are bounded in number and size");
        Scrubber { automaton, found }
    }

    /// Scrubs output, on a thread for blocking work if it is large.
    pub(crate) async fn scrub<T: Scrub>(self: Arc<Self>, output: T) -> T {
        if output.size() <= INLINE_BYTES {
            return output.scrubbed(&self);
        }
        match tokio::task::spawn_blocking(move || output.scrubbed(&self)).await {
            Ok(scrubbed) => scrubbed,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down, and drops this future.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Returns the scrubbed text, or `None` if there is nothing to replace.
    fn replace(&self, text: &str) -> Option<String> {
        let mut out = String::new();
        let (mut copied, mut from) = (0, 0);
        while let Some(found) = self.automaton.find(Input::new(text).range(from..)) {
            let replaced = match self.found[found.pattern()] {
                Found::Secret => Some((found.start()..found.end(), SECRET)),
                Found::Directory(with) => {
                    is_directory(text, found.start(), found.end()).then(|| (found.start()..found.end(), with))
                }
                // Nothing before `copied` may be replaced twice.
                Found::Backtrace(start) => {
                    backtrace::find(text, found.start(), start).map(|range| (range, backtrace::REMOVED))
                }
            };
            match replaced {
                Some((range, with)) if range.start >= copied => {
                    out.push_str(&text[copied..range.start]);
                    out.push_str(with);
                    (copied, from) = (range.end, range.end);
                }
                _ => from = found.start() + 1,
            }
        }
        (copied > 0).then(|| {
            out.push_str(&text[copied..]);
            out
        })
    }
}

/// Returns the secrets, longest first, at most [`MAX_SECRETS`].
fn secrets(sources: &Sources) -> Vec<String> {
    let own = sources.secrets.iter().map(|secret| secret.expose().to_owned());
    let variables = sources.environment.iter().filter_map(|(name, value)| {
        is_secret_name(name.to_str()?).then(|| value.to_str().map(str::to_owned)).flatten()
    });
    // A variable such as RAP_TOOL_BEARER may have several tokens.
    let parts = |value: String| {
        let parts: Vec<String> = value.split(',').map(|part| part.trim().to_owned()).collect();
        std::iter::once(value).chain(parts)
    };
    let mut found: Vec<String> =
        own.chain(variables).flat_map(parts).filter(|value| is_secret(value)).collect();
    for secret in &mut found {
        let end = (0..=MAX_SECRET_BYTES.min(secret.len())).rev().find(|end| secret.is_char_boundary(*end));
        secret.truncate(end.unwrap_or(0));
    }
    found.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    found.dedup();
    found.truncate(MAX_SECRETS);
    found
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    SECRET_NAMES.iter().any(|part| name.contains(part))
        || SECRET_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns true if a value is long enough, and neither a number nor a path.
fn is_secret(value: &str) -> bool {
    value.len() >= MIN_SECRET_BYTES
        && !value.starts_with('/')
        && !value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
}

/// Returns true if the path at this place is the directory or below it, and not part of a longer path or URL.
fn is_directory(text: &str, start: usize, end: usize) -> bool {
    let in_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '~' | '%' | '+');
    let (before, after) = (&text[..start], text[end..].chars().next());
    let begins = before.ends_with("file://") || !before.ends_with(|c: char| in_name(c) || c == '/');
    // A full stop may end the sentence.
    let sentence_ends = after == Some('.') && !text[end + 1..].starts_with(in_name);
    begins && (!after.is_some_and(in_name) || sentence_ends)
}

/// Output that can be scrubbed.
pub(crate) trait Scrub: Send + 'static {
    /// Returns the size of the texts, in bytes.
    fn size(&self) -> usize;
    fn scrubbed(self, scrubber: &Scrubber) -> Self;
}

impl Scrub for String {
    fn size(&self) -> usize {
        self.len()
    }

    fn scrubbed(self, scrubber: &Scrubber) -> Self {
        scrubber.replace(&self).unwrap_or(self)
    }
}

impl<T: Scrub> Scrub for Vec<T> {
    fn size(&self) -> usize {
        self.iter().map(Scrub::size).sum()
    }

    fn scrubbed(self, scrubber: &Scrubber) -> Self {
        self.into_iter().map(|item| item.scrubbed(scrubber)).collect()
    }
}

impl<A: Scrub, B: Scrub> Scrub for (A, B) {
    fn size(&self) -> usize {
        self.0.size() + self.1.size()
    }

    fn scrubbed(self, scrubber: &Scrubber) -> Self {
        (self.0.scrubbed(scrubber), self.1.scrubbed(scrubber))
    }
}

/// The strings of a JSON document. Names of fields stay.
impl Scrub for Value {
    fn size(&self) -> usize {
        match self {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(Scrub::size).sum(),
            Value::Object(fields) => fields.values().map(Scrub::size).sum(),
            _ => 1,
        }
    }

    fn scrubbed(self, scrubber: &Scrubber) -> Self {
        match self {
            Value::String(text) => Value::String(text.scrubbed(scrubber)),
            Value::Array(items) => Value::Array(items.scrubbed(scrubber)),
            Value::Object(fields) => Value::Object(
                fields.into_iter().map(|(name, value)| (name, value.scrubbed(scrubber))).collect(),
            ),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn scrubber(environment: &[(&str, &str)]) -> Scrubber {
        let environment = environment.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Scrubber::new(Sources {
            home: vec!["/home/ann/".into()],
            temp: vec!["/tmp".into(), "/".into(), "relative".into()],
            environment,
            secrets: vec![Secret::new("own-token-1")],
        })
    }

    fn check(environment: &[(&str, &str)], table: &[(&str, &str)]) {
        let scrubber = scrubber(environment);
        for (text, expected) in table {
            assert_eq!((*text).to_owned().scrubbed(&scrubber), *expected, "{text}");
        }
    }

    /// Proves: LC-33
    #[test]
    fn paths_below_the_home_and_temp_directories_are_shortened() {
        let table = [
            ("/home/ann/work/x.rs:3:5: error", "~/work/x.rs:3:5: error"),
            ("at '/home/ann', in /tmp/a b, /tmp.", "at '~', in [temp]/a b, [temp]."),
            ("path=/tmp/x;file:///tmp/y", "path=[temp]/x;file://[temp]/y"),
            ("/home/anna /tmp2 /tmp.d /srv/tmp /x/home/ann", "/home/anna /tmp2 /tmp.d /srv/tmp /x/home/ann"),
            ("https://example.com/tmp/x", "https://example.com/tmp/x"),
            ("/", "/"),
            ("é/tmp/é", "é/tmp/é"),
            ("„/tmp/é“", "„[temp]/é“"),
        ];
        check(&[], &table);
    }

    /// Proves: LC-33
    #[test]
    fn values_of_secret_variables_are_removed() {
        let environment = [
            ("API_TOKEN", "s3cr3t-value"),
            ("stripe_key", "sk_live_1234"),
            ("SHORT_SECRET", "1234567"),
            ("TOKEN_SECONDS", "123456789"),
            ("GOOGLE_CREDENTIALS", "/etc/google.json"),
            ("PRIVATE_KEY", "line one\nline \"two\""),
            ("RAP_TOOL_BEARER", "first-token, second-token"),
            ("PATH_LIKE", "ordinary-value"),
            ("LONGER_TOKEN", "s3cr3t-value-and-more"),
        ];
        let table = [
            ("key s3cr3t-value!", "key [secret]!"),
            ("s3cr3t-value-and-more", "[secret]"),
            ("as3cr3t-values", "a[secret]s"),
            (
                "sk_live_1234 1234567 123456789 /etc/google.json",
                "[secret] 1234567 123456789 /etc/google.json",
            ),
            ("line one\nline \"two\"", "[secret]"),
            (r#"{"key":"line one\nline \"two\""}"#, r#"{"key":"[secret]"}"#),
            ("first-token second-token own-token-1", "[secret] [secret] [secret]"),
            ("ordinary-value", "ordinary-value"),
        ];
        check(&environment, &table);
    }

    /// Proves: LC-33
    #[test]
    fn backtraces_are_removed() {
        let rust = "panicked at x\nstack backtrace:\n   0: rust_begin_unwind\n             at /rustc/a/panicking.rs:5:1\n   \
                    1: app::main\n   2: main\nnote: more";
        let bare = "failed\n   0: std::backtrace::Backtrace::create\n   1: app::run\n";
        let python = "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n    f()\nValueError: no";
        let java =
            "Exception: no\n\tat com.example.A.b(A.java:12)\n\tat java.lang.Thread.run(Unknown Source)\nthen";
        let node = "Error: no\n    at f (/srv/a.js:1:2)\n    at async g (node:internal:3)\n";
        let table = [
            (rust, "panicked at x\n[backtrace removed]\nnote: more"),
            (bare, "failed\n[backtrace removed]\n"),
            (python, "[backtrace removed]\nValueError: no"),
            (java, "Exception: no\n[backtrace removed]\nthen"),
            (node, "Error: no\n[backtrace removed]\n"),
            // Ordinary text that looks a little like it.
            ("stack backtrace:\nnone", "stack backtrace:\nnone"),
            ("    at home\n    at work", "    at home\n    at work"),
            ("   0: zero\n   1: one\n", "   0: zero\n   1: one\n"),
            ("Traceback (most recent call last):", "Traceback (most recent call last):"),
            ("x    at f (a.js:1)", "x    at f (a.js:1)"),
        ];
        check(&[], &table);
    }

    #[test]
    fn all_texts_of_a_document_are_scrubbed() {
        let (scrubber, document) = (scrubber(&[]), json!({"/tmp": ["/tmp/x", 7, {"a": "own-token-1"}]}));
        assert_eq!(document.scrubbed(&scrubber), json!({"/tmp": ["[temp]/x", 7, {"a": "[secret]"}]}));
    }

    #[test]
    fn secrets_are_bounded_in_number_and_size() {
        let variable =
            |number: usize| (format!("TOKEN_{number}").into(), format!("secret-number-{number}").into());
        let mut environment: Vec<_> = (0..2_000).map(variable).collect();
        environment.push(("LONG_KEY".into(), "é".repeat(MAX_SECRET_BYTES).into()));
        let found = secrets(&Sources { environment, ..Sources::default() });
        assert_eq!((found.len(), found[0].len()), (MAX_SECRETS, MAX_SECRET_BYTES));
    }

    /// Text that almost matches everywhere costs no more than other text.
    #[test]
    fn hostile_text_is_scrubbed_in_linear_time() {
        let scrubber = scrubber(&[("API_TOKEN", "aaaaaaaaaaaaaaaaaaaaaaab")]);
        for part in [
            "a",
            "/tmpx",
            "\n    at ",
            "   0: ",
            "Traceback (most recent call last):\n",
            "stack backtrace:\n",
        ] {
            let text = part.repeat(1024 * 1024 / part.len());
            let begun = std::time::Instant::now();
            assert!(scrubber.replace(&text).is_none(), "{part:?}");
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{part:?}: {:?}", begun.elapsed());
        }
    }
}
