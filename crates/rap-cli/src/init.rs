//! `rap init`: writes an initial configuration.

use std::fs::{OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::config::{Limits, limits};
use crate::table::wrap;

/// The commented `rap.toml` up to the limits.
const WITHOUT_LIMITS: &str = include_str!("rap.toml");
/// Maximum width of a comment.
const WIDTH: usize = 116;

/// Returns a commented `rap.toml` that lists every setting with its default.
pub fn text() -> String {
    let mut text = WITHOUT_LIMITS.to_owned();
    let thread = "Limits of a thread. An agent can have its own: a table [agent.limits] with these keys.";
    add_limits(&mut text, thread, limits::defaults(rap_agent::Limits::TABLE));
    text.push('\n');
    add_limits(&mut text, "Limits of the runtime.", limits::defaults(Limits::TABLE));
    text
}

/// Model and key of each provider in the file that `rap init --provider` writes. Others have neither.
const STARTING_POINTS: [(&str, &str, &str); 3] = [
    ("anthropic", "claude-sonnet-4-5", "env:ANTHROPIC_API_KEY"),
    ("openai", "gpt-5", "env:OPENAI_API_KEY"),
    ("openai-responses", "gpt-5", "env:OPENAI_API_KEY"),
];

/// Returns the name of the variable for the key in the file for a provider.
pub fn key_variable(provider: &str) -> Option<&'static str> {
    let (.., key) = STARTING_POINTS.iter().find(|(known, ..)| *known == provider)?;
    key.strip_prefix("env:")
}

/// Returns the names of the providers.
pub fn providers() -> [&'static str; 4] {
    crate::config::providers()
}

/// Returns the same with a provider, a model and the name of a variable for the key.
pub fn text_for(provider: &str) -> String {
    let text = text().replace("#provider = \"scripted\"", &format!("provider = \"{provider}\""));
    let Some((_, name, key)) = STARTING_POINTS.iter().find(|(known, ..)| *known == provider) else {
        return text;
    };
    text.replace("# Example: name = \"gpt-5\"", &format!("name = \"{name}\""))
        .replace("# Example: api_key = \"env:OPENAI_API_KEY\"", &format!("api_key = \"{key}\""))
}

fn add_limits(text: &mut String, title: &str, limits: impl Iterator<Item = (&'static str, String, String)>) {
    text.push_str(&format!("# {title}\n"));
    for (key, default, about) in limits {
        let lines: String = wrap(&about, WIDTH).iter().map(|line| format!("# {line}\n")).collect();
        text.push_str(&format!("\n{lines}#{key} = {default}\n"));
    }
}

/// Handling of an existing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Fail.
    Keep,
    /// Overwrite it.
    Replace,
}

/// Reason why no file was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file exists.
    #[error("{} exists; use --force to overwrite it", .0.display())]
    Exists(PathBuf),
    /// The file cannot be written.
    #[error("cannot write {}: {why}", path.display())]
    Unwritable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        why: io::Error,
    },
}

/// Writes [`text`] to a file, or [`text_for`] a provider.
pub fn write(path: &Path, existing: Existing, provider: Option<&str>) -> Result<(), Error> {
    let text = provider.map_or_else(text, text_for);
    let mut options = OpenOptions::new();
    // The file may get secrets.
    options.mode(0o600);
    match existing {
        Existing::Keep => options.write(true).create_new(true),
        Existing::Replace => options.write(true).create(true).truncate(true),
    };
    let written = options.open(path).and_then(|mut file| {
        // An existing file keeps its mode when it is opened.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(text.as_bytes())
    });
    written.map_err(|why| match why.kind() {
        io::ErrorKind::AlreadyExists => Error::Exists(path.to_owned()),
        _ => Error::Unwritable { path: path.to_owned(), why },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_file_is_only_replaced_on_request() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rap.toml");
        std::fs::write(&path, "mine").unwrap();
        let error = write(&path, Existing::Keep, None).unwrap_err();
        assert_eq!(error.to_string(), format!("{} exists; use --force to overwrite it", path.display()));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        write(&path, Existing::Replace, None).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text());
    }

    #[test]
    fn a_provider_is_written_with_a_model_and_a_key() {
        use crate::config::{Config, Environment, File, Sources};
        for provider in providers() {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("rap.toml");
            write(&path, Existing::Keep, Some(provider)).unwrap();
            let keys = ["ANTHROPIC_API_KEY", "OPENAI_API_KEY"].map(|name| (name.to_owned(), "k".to_owned()));
            let environment = Environment::from(keys);
            let sources = Sources { file: File::Given(path), environment, flags: Vec::new() };
            let model = Config::load(&sources).unwrap().model;
            assert_eq!(model.provider.name, provider);
            assert_eq!(model.options.api_key.is_some(), provider != "scripted", "{provider}");
            assert_eq!(model.options.name.is_empty(), provider == "scripted", "{provider}");
        }
    }

    #[test]
    fn the_file_can_be_read_by_its_owner_only() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rap.toml");
        for existing in [Existing::Keep, Existing::Replace] {
            write(&path, existing, None).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        }
    }

    #[test]
    fn an_error_names_the_file_that_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("no/rap.toml");
        let error = write(&path, Existing::Keep, None).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
    }
}
