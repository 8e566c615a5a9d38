//! Commands that run without a question, and commands that a person has approved for a session.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;

use rap_tool::prelude::*;

/// Characters that `*` does not match, because they begin another command or redirect its output.
const NOT_MATCHED: &str = ";&|<>()$`\\{}\n\r";
/// Maximum length of a command that a person is asked about, in bytes.
const ASKED_BYTES: usize = 4000;
/// Maximum number of approved commands of a session.
const APPROVED: usize = 1000;
const CHOICES: [&str; 3] = ["Allow", "Allow again without asking in this session", "Refuse"];
const REFUSE: usize = 2;

pub(super) struct Approvals {
    /// If this is empty, nobody is asked.
    patterns: Vec<String>,
    /// Directory with a file for each session. Commands cannot write to it.
    directory: PathBuf,
}

impl Approvals {
    pub(super) fn new(patterns: Vec<String>, directory: PathBuf) -> Self {
        Approvals { patterns, directory }
    }

    /// Returns when the command may run. An error says that it may not.
    pub(super) async fn approve(&self, call: &Call, command: &str) -> Result<()> {
        if self.patterns.is_empty() || self.patterns.iter().any(|pattern| matches(pattern, command.trim())) {
            return Ok(());
        }
        let file = self.directory.join(call.session().key());
        let mut approved = read(file.clone()).await?;
        if approved.iter().any(|known| known == command) {
            return Ok(());
        }
        if command.len() > ASKED_BYTES {
            return Err(Error::new(
                "the command is too long to ask a person about; write it to a file first",
            ));
        }
        match call.choose(format!("Run this command?\n\n{command}"), CHOICES, REFUSE).await? {
            0 => Ok(()),
            1 => {
                approved.truncate(APPROVED - 1);
                approved.push(command.to_owned());
                write(file, approved).await?;
                Ok(())
            }
            _ => Err(Error::new("a person refused to run this command")),
        }
    }

    /// Deletes the approved commands of a session. `key` is that of its root thread; other threads have no file.
    pub(super) async fn forget(&self, key: &str) {
        let file = self.directory.join(key);
        match tokio::fs::remove_file(file).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "the approved commands of a session could not be deleted");
            }
            _ => {}
        }
    }
}

async fn read(file: PathBuf) -> Result<Vec<String>> {
    match tokio::fs::read(file).await {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

async fn write(file: PathBuf, approved: Vec<String>) -> Result<()> {
    let text = serde_json::to_vec(&approved)?;
    let written = tokio::task::spawn_blocking(move || {
        let directory = file.parent().ok_or(io::ErrorKind::NotFound)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let new = file.with_extension("new");
        let mut options = fs::OpenOptions::new();
        let mut opened = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        io::Write::write_all(&mut opened, &text)?;
        fs::rename(new, file)
    });
    Ok(written.await.map_err(io::Error::other)??)
}

/// Returns true if a command is like a pattern in which `*` stands for any characters but [`NOT_MATCHED`]. A pattern that
/// contains such characters itself may match less than it could.
fn matches(pattern: &str, command: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == command };
    let Some(mut rest) = command.strip_prefix(before) else { return false };
    let free = |text: &str| !text.contains(|c| NOT_MATCHED.contains(c));
    let mut parts = after.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.strip_suffix(part).is_some_and(free);
        }
        let Some(at) = rest.find(part) else { return false };
        if !free(&rest[..at]) {
            return false;
        }
        rest = &rest[at + part.len()..];
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_matches_arguments_but_no_second_command() {
        for (pattern, command, expected) in [
            ("git status", "git status", true),
            ("git status", "git status -s", false),
            ("git *", "git log --oneline", true),
            ("git *", "git", false),
            ("make*", "make test", true),
            ("git * --stat", "git diff HEAD --stat", true),
            ("git *", "git log; rm -rf .", false),
            ("git *", "git log && id", false),
            ("git *", "git log $(id)", false),
            ("git *", "git log > /etc/passwd", false),
            ("git *", "git log\nid", false),
            ("*", "echo `id`", false),
            ("*", "ls -l", true),
        ] {
            assert_eq!(matches(pattern, command), expected, "{pattern:?} {command:?}");
        }
    }
}
