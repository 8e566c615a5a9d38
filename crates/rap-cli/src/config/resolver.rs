//! Resolves what settings refer to: environment variables, files and relative paths.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

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
}

impl<'a> Resolver<'a> {
    pub(super) fn new(environment: &'a Environment, file: &'a Path) -> Self {
        Resolver { environment, file, secret_files: RefCell::default() }
    }

    /// Returns the files from which secrets were read so far.
    pub(super) fn secret_files(&self) -> Vec<PathBuf> {
        self.secret_files.borrow().iter().cloned().collect()
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
        let (Value::Text(written) | Value::Untyped(written)) = &setting.value else {
            let (expected, found) = (SECRET_EXPECTED.to_owned(), setting.value.kind().to_owned());
            return Err(Problem::Found { expected, found });
        };
        let secret = match (written.strip_prefix("env:"), written.strip_prefix("file:")) {
            (Some(name), _) => self.variable(name)?,
            (_, Some(path)) => {
                let path = self.path(path, &setting.location);
                self.secret_files.borrow_mut().insert(path.clone());
                content(path)?
            }
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
