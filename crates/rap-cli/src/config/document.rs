//! A parsed but not yet validated configuration: values, each with its location.
//!
//! The values have no `Debug` because they may be secrets.

use std::collections::BTreeMap;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::mistake::{Error, Location};
use super::{Environment, Flag};

/// Sections whose keys an environment variable can override.
const OVERRIDABLE: [&str; 6] = ["server", "store", "model", "telemetry", "retention", "limits"];

/// Settings by key.
pub(super) type Table = BTreeMap<String, Setting>;

/// A value and its location.
pub(super) struct Setting {
    pub(super) value: Value,
    pub(super) location: Location,
}

pub(super) enum Value {
    Text(String),
    /// Text of a variable or a flag. It is parsed as the type of its key.
    Untyped(String),
    Integer(i64),
    Boolean(bool),
    /// A float, as it is written.
    Float(String),
    List(Vec<Setting>),
    Table(Table),
    /// A type that no key has, as named in errors.
    Other(&'static str),
}

impl Value {
    /// Returns the name of the type, with its article.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) | Value::Untyped(_) => "a string",
            Value::Integer(_) => "an integer",
            Value::Boolean(_) => "a boolean",
            Value::Float(_) => "a float",
            Value::List(_) => "an array",
            Value::Table(_) => "a table",
            Value::Other(kind) => kind,
        }
    }
}

/// Parses TOML. `name` is the file name in locations.
pub(super) fn parse(text: &str, name: &str) -> Result<Table, Error> {
    let lines = Lines::new(text, name);
    match DeTable::parse(text) {
        Ok(table) => Ok(lines.table(table.into_inner())),
        Err(error) => {
            let location = lines.location(error.span().map_or(0, |span| span.start));
            Err(Error::Syntax { location, message: error.message().to_owned() })
        }
    }
}

/// Applies environment variables to the document. An empty variable counts as not set.
pub(super) fn apply_variables(document: &mut Table, environment: &Environment) {
    for (name, text) in environment.iter().filter(|(_, text)| !text.is_empty()) {
        if let Some((section, key)) = key_of(name) {
            set(document, section, &key, untyped(text, Location::Variable(name.clone())));
        }
    }
}

/// Applies flags to the document.
pub(super) fn apply_flags(document: &mut Table, flags: &[Flag]) {
    for flag in flags {
        let (section, key) = flag.key.split_once('.').expect("bug: the key of a flag has a section");
        set(document, section, key, untyped(&flag.value, Location::Flag(flag.name)));
    }
}

/// Splits `RAP_SECTION_KEY` into section and key.
fn key_of(variable: &str) -> Option<(&'static str, String)> {
    let rest = variable.strip_prefix("RAP_")?.to_ascii_lowercase();
    OVERRIDABLE.into_iter().find_map(|section| {
        let key = rest.strip_prefix(section)?.strip_prefix('_')?;
        Some((section, key.to_owned()))
    })
}

fn untyped(text: &str, location: Location) -> Setting {
    Setting { value: Value::Untyped(text.to_owned()), location }
}

/// Sets a key. If the section in the file is not a table, nothing is set; that mistake is reported later.
fn set(document: &mut Table, section: &str, key: &str, setting: Setting) {
    let location = setting.location.clone();
    let section = document
        .entry(section.to_owned())
        .or_insert_with(|| Setting { value: Value::Table(Table::new()), location });
    if let Value::Table(table) = &mut section.value {
        table.insert(key.to_owned(), setting);
    }
}

/// Offsets of the lines of a file, to compute locations.
struct Lines {
    file: Arc<str>,
    starts: Vec<usize>,
}

impl Lines {
    fn new(text: &str, file: &str) -> Self {
        let after_breaks = text.match_indices('\n').map(|(at, _)| at + 1);
        Lines { file: file.into(), starts: std::iter::once(0).chain(after_breaks).collect() }
    }

    fn location(&self, offset: usize) -> Location {
        let line = self.starts.partition_point(|start| *start <= offset);
        Location::Line { file: Arc::clone(&self.file), line }
    }

    fn table(&self, table: DeTable<'_>) -> Table {
        let setting = |(key, value): (Spanned<_>, Spanned<DeValue<'_>>)| {
            let location = self.location(key.span().start);
            let key: std::borrow::Cow<'_, str> = key.into_inner();
            (key.into_owned(), Setting { value: self.value(value.into_inner()), location })
        };
        table.into_iter().map(setting).collect()
    }

    fn value(&self, value: DeValue<'_>) -> Value {
        match value {
            DeValue::String(text) => Value::Text(text.into_owned()),
            DeValue::Integer(integer) => i64::from_str_radix(integer.as_str(), integer.radix())
                .map_or(Value::Other("a larger integer"), Value::Integer),
            DeValue::Boolean(boolean) => Value::Boolean(boolean),
            DeValue::Array(items) => Value::List(items.into_iter().map(|item| self.item(item)).collect()),
            DeValue::Table(table) => Value::Table(self.table(table)),
            DeValue::Float(float) => Value::Float(float.as_str().to_owned()),
            DeValue::Datetime(_) => Value::Other("a date"),
        }
    }

    fn item(&self, item: Spanned<DeValue<'_>>) -> Setting {
        let location = self.location(item.span().start);
        Setting { value: self.value(item.into_inner()), location }
    }
}
