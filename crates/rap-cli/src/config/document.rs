//! A configuration before anyone knows its keys: values, each with the place where it was written.
//!
//! These values may be secrets, so they have no `Debug`.

use std::collections::BTreeMap;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::mistake::{Error, Place};
use super::{Environment, Flag};

/// The sections whose keys a variable can override: one table each.
const OVERRIDABLE: [&str; 4] = ["server", "store", "model", "limits"];

/// Keys and what was set.
pub(super) type Table = BTreeMap<String, Setting>;

/// A value and where it was written.
pub(super) struct Setting {
    pub(super) value: Value,
    pub(super) place: Place,
}

/// What was set.
pub(super) enum Value {
    Text(String),
    /// The text of a variable or a flag: it is of whatever type its key has.
    Loose(String),
    Integer(i64),
    Boolean(bool),
    List(Vec<Setting>),
    Table(Table),
    /// A type that no key has.
    Other(&'static str),
}

impl Value {
    /// The type, with its article.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) | Value::Loose(_) => "a string",
            Value::Integer(_) => "an integer",
            Value::Boolean(_) => "a boolean",
            Value::List(_) => "an array",
            Value::Table(_) => "a table",
            Value::Other(kind) => kind,
        }
    }
}

/// Reads TOML. `name` is what places call the file.
pub(super) fn parse(text: &str, name: &str) -> Result<Table, Error> {
    let lines = Lines::new(text, name);
    match DeTable::parse(text) {
        Ok(table) => Ok(lines.table(table.into_inner())),
        Err(error) => {
            let place = lines.place(error.span().map_or(0, |span| span.start));
            Err(Error::Syntax { place, message: error.message().to_owned() })
        }
    }
}

/// Lays the variables over what the file says. An empty variable says nothing.
pub(super) fn lay_variables(document: &mut Table, environment: &Environment) {
    for (name, text) in environment.iter().filter(|(_, text)| !text.is_empty()) {
        if let Some((section, key)) = key_of(name) {
            set(document, section, &key, loose(text, Place::Variable(name.clone())));
        }
    }
}

/// Lays the flags over what file and variables say.
pub(super) fn lay_flags(document: &mut Table, flags: &[Flag]) {
    for flag in flags {
        let (section, key) = flag.key.split_once('.').expect("bug: a flag names section and key");
        set(document, section, key, loose(&flag.value, Place::Flag(flag.name)));
    }
}

/// `RAP_SECTION_KEY`.
fn key_of(variable: &str) -> Option<(&'static str, String)> {
    let rest = variable.strip_prefix("RAP_")?.to_ascii_lowercase();
    OVERRIDABLE.into_iter().find_map(|section| {
        let key = rest.strip_prefix(section)?.strip_prefix('_')?;
        Some((section, key.to_owned()))
    })
}

fn loose(text: &str, place: Place) -> Setting {
    Setting { value: Value::Loose(text.to_owned()), place }
}

/// Where the file has something else than a table, that mistake is told instead.
fn set(document: &mut Table, section: &str, key: &str, setting: Setting) {
    let place = setting.place.clone();
    let section = document
        .entry(section.to_owned())
        .or_insert_with(|| Setting { value: Value::Table(Table::new()), place });
    if let Value::Table(table) = &mut section.value {
        table.insert(key.to_owned(), setting);
    }
}

/// Where the lines of a file begin.
struct Lines {
    file: Arc<str>,
    starts: Vec<usize>,
}

impl Lines {
    fn new(text: &str, file: &str) -> Self {
        let after_breaks = text.match_indices('\n').map(|(at, _)| at + 1);
        Lines { file: file.into(), starts: std::iter::once(0).chain(after_breaks).collect() }
    }

    fn place(&self, offset: usize) -> Place {
        let line = self.starts.partition_point(|start| *start <= offset);
        Place::Line { file: Arc::clone(&self.file), line }
    }

    fn table(&self, table: DeTable<'_>) -> Table {
        let setting = |(key, value): (Spanned<_>, Spanned<DeValue<'_>>)| {
            let place = self.place(key.span().start);
            let key: std::borrow::Cow<'_, str> = key.into_inner();
            (key.into_owned(), Setting { value: self.value(value.into_inner()), place })
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
            DeValue::Float(_) => Value::Other("a float"),
            DeValue::Datetime(_) => Value::Other("a date"),
        }
    }

    fn item(&self, item: Spanned<DeValue<'_>>) -> Setting {
        let place = self.place(item.span().start);
        Setting { value: self.value(item.into_inner()), place }
    }
}
