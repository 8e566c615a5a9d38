//! What a configuration takes from outside of its file: variables, other files, paths.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rap_protocol::Secret;

use super::Environment;
use super::document::{Setting, Value};
use super::mistake::{Place, Problem};
use super::value;

/// The longest secret, in bytes; it has to fit into a header.
const SECRET_BYTES: usize = 4096;

const SECRET_EXPECTED: &str = "a secret of visible ASCII letters, 4096 at most, or env:NAME, or file:PATH";

/// Where names and paths of a configuration lead.
pub(super) struct Outside<'a> {
    /// The environment variables.
    pub(super) environment: &'a Environment,
    /// The directory of the file.
    pub(super) directory: &'a Path,
}

impl Outside<'_> {
    /// A relative path begins at the file that names it; in a variable or flag, where the command runs.
    pub(super) fn path(&self, written: &str, place: &Place) -> PathBuf {
        match place {
            Place::Line { .. } => self.directory.join(written),
            Place::Variable(_) | Place::Flag(_) => PathBuf::from(written),
        }
    }

    /// The path of a file that can be read.
    pub(super) fn readable(&self, setting: &Setting) -> Result<PathBuf, Problem> {
        let path = self.path(value::text(setting)?, &setting.place);
        match File::open(&path).and_then(|file| file.metadata()) {
            Ok(file) if file.is_dir() => Err(unreadable(path, io::ErrorKind::IsADirectory.into())),
            Ok(_) => Ok(path),
            Err(why) => Err(unreadable(path, why)),
        }
    }

    /// A secret: `env:NAME`, `file:PATH` or the secret itself. No problem repeats it.
    pub(super) fn secret(&self, setting: &Setting) -> Result<Secret, Problem> {
        let (Value::Text(written) | Value::Loose(written)) = &setting.value else {
            let (expected, found) = (SECRET_EXPECTED.to_owned(), setting.value.kind().to_owned());
            return Err(Problem::Found { expected, found });
        };
        let secret = match (written.strip_prefix("env:"), written.strip_prefix("file:")) {
            (Some(name), _) => self.variable(name)?,
            (_, Some(path)) => content(self.path(path, &setting.place))?,
            _ => written.clone(),
        };
        let visible = !secret.is_empty() && secret.bytes().all(|byte| byte.is_ascii_graphic());
        let fits = visible && secret.len() <= SECRET_BYTES;
        if fits { Ok(Secret::new(secret)) } else { Err(Problem::Expected(SECRET_EXPECTED)) }
    }

    fn variable(&self, name: &str) -> Result<String, Problem> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if name.is_empty() || !name.bytes().all(plain) {
            return Err(Problem::Expected("the name of an environment variable after env:"));
        }
        match self.environment.get(name) {
            None => Err(Problem::NotSet(name.to_owned())),
            Some(text) if text.is_empty() => Err(Problem::Empty(name.to_owned())),
            Some(text) => Ok(text.clone()),
        }
    }
}

/// The content of a file without the line break at its end. No more of it is read than a secret may have.
fn content(path: PathBuf) -> Result<String, Problem> {
    let mut text = String::new();
    let most = SECRET_BYTES as u64 + 3;
    match File::open(&path).and_then(|file| file.take(most).read_to_string(&mut text)) {
        Ok(_) => {}
        Err(why) => return Err(unreadable(path, why)),
    }
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

fn unreadable(path: PathBuf, why: io::Error) -> Problem {
    Problem::Unreadable { path, why }
}
