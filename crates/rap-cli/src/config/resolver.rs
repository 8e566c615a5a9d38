//! Resolves the environment variables, files and relative paths that settings refer to.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rap_io::reloading::SecretSource;
use rap_protocol::Secret;

use super::Environment;
use super::document::{Setting, Value};
use super::mistake::{Location, Problem};
use super::value;

/// Maximum length of a secret, in bytes: it has to fit into a header.
const SECRET_BYTES: usize = 4096;

const SECRET_EXPECTED: &str = "a secret of at most 4096 visible ASCII characters, or env:NAME, or file:PATH";

pub(super) struct Resolver<'a> {
    environment: &'a Environment,
    /// Configuration file.
    file: &'a Path,
    secret_files: RefCell<BTreeSet<PathBuf>>,
    secret_variables: RefCell<BTreeSet<String>>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(environment: &'a Environment, file: &'a Path) -> Self {
        Resolver { environment, file, secret_files: RefCell::default(), secret_variables: RefCell::default() }
    }

    /// Returns the files from which secrets were read so far.
    pub(super) fn secret_files(&self) -> Vec<PathBuf> {
        self.secret_files.borrow().iter().cloned().collect()
    }

    /// Returns the environment variables from which secrets were read so far.
    pub(super) fn secret_variables(&self) -> Vec<String> {
        self.secret_variables.borrow().iter().cloned().collect()
    }

    /// Resolves a path. A relative path in the file is relative to the directory of the file; in a variable or flag, to
    /// the current directory.
    pub(super) fn path(&self, written: &str, location: &Location) -> PathBuf {
        match location {
            Location::Line { .. } => self.file.parent().unwrap_or(Path::new("")).join(written),
            Location::Variable(_) | Location::Flag(_) => PathBuf::from(written),
        }
    }

    /// Returns the path of a file, after a check that it can be read.
    pub(super) fn readable(&self, setting: &Setting) -> Result<PathBuf, Problem> {
        let path = self.path(value::text(setting)?, &setting.location);
        match File::open(&path).and_then(|file| file.metadata()) {
            Ok(file) if file.is_dir() => Err(unreadable(path, io::ErrorKind::IsADirectory.into())),
            Ok(_) => Ok(path),
            Err(why) => Err(unreadable(path, why)),
        }
    }

    /// Reads a secret: `env:NAME`, `file:PATH` or the secret itself. Errors do not contain it.
    pub(super) fn secret(&self, setting: &Setting) -> Result<Secret, Problem> {
        checked(&self.secret_text(setting)?)
    }

    /// Reads the value of a header as a secret, which may contain spaces, as in `Bearer TOKEN`.
    pub(super) fn header_value(&self, setting: &Setting) -> Result<Secret, Problem> {
        let text = self.secret_text(setting)?;
        checked(&text.replace(' ', "_")).map(|_| Secret::new(text.as_str()))
    }

    fn secret_text(&self, setting: &Setting) -> Result<String, Problem> {
        let (Value::Text(written) | Value::Untyped(written)) = &setting.value else {
            let (expected, found) = (SECRET_EXPECTED.to_owned(), setting.value.kind().to_owned());
            return Err(Problem::Found { expected, found });
        };
        match (written.strip_prefix("env:"), written.strip_prefix("file:")) {
            (Some(name), _) => self.variable(name),
            (_, Some(path)) => {
                let path = self.path(path, &setting.location);
                self.secret_files.borrow_mut().insert(path.clone());
                content(path)
            }
            _ => Ok(written.clone()),
        }
    }

    /// Reads a secret that is read again when it is in a file that changes: `env:NAME`, `file:PATH` or the secret itself.
    /// The file may have several secrets, one in each line.
    pub(super) fn secret_source(&self, setting: &Setting) -> Result<SecretSource, Problem> {
        let (Value::Text(written) | Value::Untyped(written)) = &setting.value else {
            return self.secret(setting).map(SecretSource::Given);
        };
        let Some(path) = written.strip_prefix("file:") else {
            return self.secret(setting).map(SecretSource::Given);
        };
        let source = SecretSource::File(self.path(path, &setting.location));
        self.secrets(&source)?;
        Ok(source)
    }

    /// Reads the secrets of a source.
    pub(super) fn secrets(&self, source: &SecretSource) -> Result<Vec<Secret>, Problem> {
        let path = match source {
            SecretSource::Given(secret) => return Ok(vec![secret.clone()]),
            SecretSource::File(path) => path,
        };
        self.secret_files.borrow_mut().insert(path.clone());
        let text = content(path.clone())?;
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            return Err(Problem::Expected(SECRET_EXPECTED));
        }
        lines.into_iter().map(checked).collect()
    }

    /// Returns the path of a file, which may be written with `file:` before it, after a check that it can be read. A
    /// file with a secret is remembered as one.
    pub(super) fn file(&self, setting: &Setting, is_secret: bool) -> Result<PathBuf, Problem> {
        let written = value::text(setting)?;
        let value = Value::Text(written.strip_prefix("file:").unwrap_or(written).to_owned());
        let path = self.readable(&Setting { value, location: setting.location.clone() })?;
        if is_secret {
            self.secret_files.borrow_mut().insert(path.clone());
        }
        Ok(path)
    }

    /// Returns an environment variable that contains a secret, if it is set.
    pub(super) fn variable_if_set(&self, name: &str) -> Option<Secret> {
        self.environment.get(name).and_then(|text| checked(text).ok())
    }

    /// Returns an environment variable that is known to contain a secret, if it is set.
    pub(super) fn secret_variable(&self, name: &str) -> Option<&'a str> {
        let text = self.plain_variable(name).filter(|text| !text.is_empty())?;
        self.secret_variables.borrow_mut().insert(name.to_owned());
        Some(text)
    }

    /// Returns an environment variable, if it is set.
    pub(super) fn plain_variable(&self, name: &str) -> Option<&'a str> {
        self.environment.get(name).map(String::as_str)
    }

    fn variable(&self, name: &str) -> Result<String, Problem> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if name.is_empty() || !name.bytes().all(plain) {
            return Err(Problem::Expected("the name of an environment variable after env:"));
        }
        self.secret_variables.borrow_mut().insert(name.to_owned());
        match self.environment.get(name) {
            None => Err(Problem::NotSet(name.to_owned())),
            Some(text) if text.is_empty() => Err(Problem::Empty(name.to_owned())),
            Some(text) => Ok(text.clone()),
        }
    }
}

fn checked(secret: &str) -> Result<Secret, Problem> {
    let visible = !secret.is_empty() && secret.bytes().all(|byte| byte.is_ascii_graphic());
    let fits = visible && secret.len() <= SECRET_BYTES;
    if fits { Ok(Secret::new(secret)) } else { Err(Problem::Expected(SECRET_EXPECTED)) }
}

/// Returns the content of a file without a final line break. Reads no more than the maximum length of a secret.
fn content(path: PathBuf) -> Result<String, Problem> {
    let mut text = String::new();
    let limit = SECRET_BYTES as u64 + 3;
    match File::open(&path).and_then(|file| file.take(limit).read_to_string(&mut text)) {
        Ok(_) => {}
        Err(why) => return Err(unreadable(path, why)),
    }
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

fn unreadable(path: PathBuf, why: io::Error) -> Problem {
    Problem::Unreadable { path, why }
}
