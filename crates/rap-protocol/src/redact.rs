//! Keeps secrets and internal details out of logs and error messages.

use std::fmt;

use serde::Deserialize;
use url::Url;

/// Maximum number of characters of an error text that are passed on.
const TEXT_CHARS: usize = 1_000;

/// Token or password. `Debug` prints `…` instead of its value. `==` does not run in constant time: code that checks
/// credentials has to compare them itself.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Secret(secret.into())
    }

    /// Returns the secret. The caller has to keep it out of logs and error messages.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Returns scheme, host and port of a URL. The rest may be a capability and is replaced by `/…`.
pub fn url(url: &Url) -> String {
    let host = url.host_str().unwrap_or("");
    match url.port() {
        Some(port) => format!("{}://{host}:{port}/…", url.scheme()),
        None => format!("{}://{host}/…", url.scheme()),
    }
}

/// Returns the first line of an error text without file paths and without the paths of URLs, so that it can be shown
/// outside of this process.
pub fn text(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("").trim();
    let mut out = String::new();
    let mut word = String::new();
    for c in line.chars().take(TEXT_CHARS) {
        if ends_word(c, &word) {
            out.push_str(&redact_word(&word));
            word.clear();
            out.push(c);
        } else {
            word.push(c);
        }
    }
    out.push_str(&redact_word(&word));
    if line.chars().nth(TEXT_CHARS).is_some() {
        out.push('…');
    }
    out
}

/// A URL may contain characters that end other words, and its last part may be the secret. Inside of a URL,
/// parentheses, `,`, `;` and `=` therefore do not end a word.
fn ends_word(c: char, word: &str) -> bool {
    c.is_whitespace()
        || matches!(c, '"' | '\'' | '`' | '<' | '>')
        || (matches!(c, '(' | ')' | ',' | ';' | '=') && !word.contains("://"))
}

fn redact_word(word: &str) -> String {
    let bare = word.trim_end_matches([':', '.', '!', '?', ']', '}']);
    let tail = &word[bare.len()..];
    if let Some(at) = bare.find("://") {
        let start = bare[..at].trim_end_matches(|c: char| c.is_ascii_alphanumeric()).len();
        return match Url::parse(&bare[start..]) {
            Ok(parsed) => format!("{}{}{tail}", &bare[..start], url(&parsed)),
            Err(_) => format!("[url]{tail}"),
        };
    }
    if is_path(bare) { format!("[path]{tail}") } else { word.to_owned() }
}

/// Recognizes absolute Unix and Windows paths, paths below the home directory, and locations in source files.
fn is_path(word: &str) -> bool {
    let word = word.trim_start_matches(['[', '{', '@']);
    let bytes = word.as_bytes();
    let unix = bytes.len() > 1 && bytes[0] == b'/' && bytes[1] != b'/' && word[1..].contains('/');
    let root = ["/etc", "/home", "/root", "/tmp", "/usr", "/var", "/proc", "/run"];
    let windows = bytes.len() > 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && bytes[2] == b'\\';
    let home = word.starts_with("~/") || word.starts_with("\\\\");
    let source = word.contains(".rs:") || word.ends_with(".rs");
    unix || windows || home || source || root.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves: LC-33
    #[test]
    fn file_paths_and_url_paths_are_redacted() {
        let table = [
            ("cannot open /etc/shadow: permission denied", "cannot open [path]: permission denied"),
            ("at src/main.rs:10:5", "at [path]"),
            ("no file \"/home/me/a b\"", "no file \"[path] b\""),
            ("C:\\Users\\me\\x.txt is missing", "[path] is missing"),
            ("path=/var/lib/x, mode 0600", "path=[path], mode 0600"),
            ("GET https://u:p@api.example.com/v1/keys?k=s failed", "GET https://api.example.com/… failed"),
            ("retrying→https://api.example.com/v1/keys", "retrying→https://api.example.com/…"),
            ("3/4 of and/or is fine, /done too", "3/4 of and/or is fine, /done too"),
            ("first line\n   0: backtrace::capture\n", "first line"),
            ("\n\n", ""),
        ];
        for (text, expected) in table {
            assert_eq!(super::text(text), expected, "{text}");
        }
    }

    #[test]
    fn long_texts_are_truncated() {
        assert_eq!(text(&"é".repeat(5_000)).chars().count(), TEXT_CHARS + 1);
    }

    #[test]
    fn secrets_are_not_printed() {
        assert_eq!(format!("{:?}", Secret::new("hunter2")), "Secret(…)");
    }
}
