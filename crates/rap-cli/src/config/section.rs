//! Reads a table key by key. A mistake is recorded and reading continues, so that all mistakes are reported at once.
//!
//! Every key that is read becomes a known key; any other key in the table is a mistake.

use std::collections::BTreeSet;

use super::document::{Setting, Table, Value};
use super::mistake::{Location, Mistake, Problem};
use crate::suggestion::closest;

/// Mistakes and known keys, collected while tables are read.
#[derive(Default)]
pub(super) struct Diagnostics {
    pub(super) mistakes: Vec<Mistake>,
    /// Every key that was read, with its section.
    pub(super) known: BTreeSet<String>,
}

/// A table that is being read. [`Section::finish`] reports unknown keys.
#[must_use]
pub(super) struct Section<'a> {
    name: &'static str,
    table: Table,
    known: Vec<&'static str>,
    diagnostics: &'a mut Diagnostics,
}

impl<'a> Section<'a> {
    /// `name` is empty for the root of the document.
    pub(super) fn new(name: &'static str, table: Table, diagnostics: &'a mut Diagnostics) -> Self {
        Section { name, table, known: Vec::new(), diagnostics }
    }

    /// Reads a key with `parse`. Returns `None` if the key is not set or invalid.
    pub(super) fn read<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&Setting) -> Result<T, Problem>,
    ) -> Option<T> {
        let setting = self.take(key)?;
        self.parsed(key, &setting, parse)
    }

    /// Reads a list whose items are all valid. In a variable or flag, items are separated by commas.
    pub(super) fn read_list<T>(
        &mut self,
        key: &'static str,
        expected: &str,
        parse: impl Fn(&Setting) -> Result<T, Problem>,
    ) -> Option<Vec<T>> {
        let setting = self.take(key)?;
        let items = match setting.value {
            Value::List(items) => items,
            Value::Untyped(text) => split(&text, &setting.location),
            _ => {
                self.refuse_kind(key, &setting, expected);
                return None;
            }
        };
        let parsed: Vec<Option<T>> = items.iter().map(|item| self.parsed(key, item, &parse)).collect();
        parsed.into_iter().collect()
    }

    /// Reads a nested table; empty if there is none.
    pub(super) fn table(&mut self, key: &'static str) -> Table {
        match self.take(key) {
            None => Table::new(),
            Some(Setting { value: Value::Table(table), .. }) => table,
            Some(other) => {
                self.refuse_kind(key, &other, &format!("a table, written [{key}]"));
                Table::new()
            }
        }
    }

    /// Reads an array of tables, each with its location.
    pub(super) fn tables(&mut self, key: &'static str) -> Vec<(Location, Table)> {
        let mut tables = Vec::new();
        let Some(setting) = self.take(key) else { return tables };
        let expected = format!("an array of tables, written [[{key}]]");
        let Value::List(items) = setting.value else {
            self.refuse_kind(key, &setting, &expected);
            return tables;
        };
        for Setting { value, location } in items {
            match value {
                Value::Table(table) => tables.push((location, table)),
                value => self.refuse_kind(key, &Setting { value, location }, &expected),
            }
        }
        tables
    }

    /// Accepts an earlier name of a key.
    pub(super) fn accept_former(&mut self, former: &str, key: &'static str) {
        let Some(setting) = self.table.remove(former) else { return };
        match self.location_of(key) {
            Some(other) => self.refuse(former, setting.location, Problem::Repeated(other)),
            None => _ = self.table.insert(key.to_owned(), setting),
        }
    }

    /// Adds known keys that are read elsewhere.
    pub(super) fn mark_known(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    /// Returns the location of a key that is set and was not read yet.
    pub(super) fn location_of(&self, key: &str) -> Option<Location> {
        self.table.get(key).map(|setting| setting.location.clone())
    }

    /// Records a mistake.
    pub(super) fn refuse(&mut self, key: &str, location: Location, problem: Problem) {
        self.diagnostics.mistakes.push(Mistake { location, key: full_key(self.name, key), problem });
    }

    /// Records every remaining key as unknown.
    pub(super) fn finish(mut self) {
        for (key, setting) in std::mem::take(&mut self.table) {
            match closest(&key, &self.known) {
                Some(known) => self.refuse(&key, setting.location, Problem::Misspelt(known)),
                // Other software may set a variable such as RAP_SERVER_PORT; Kubernetes does for a service.
                None if matches!(setting.location, Location::Variable(_)) => {}
                None => self.refuse(&key, setting.location, Problem::Unknown),
            }
        }
        self.diagnostics.known.extend(self.known.iter().map(|key| full_key(self.name, key)));
    }

    fn take(&mut self, key: &'static str) -> Option<Setting> {
        self.known.push(key);
        self.table.remove(key)
    }

    fn parsed<T>(
        &mut self,
        key: &str,
        setting: &Setting,
        parse: impl FnOnce(&Setting) -> Result<T, Problem>,
    ) -> Option<T> {
        let refuse = |problem| self.refuse(key, setting.location.clone(), problem);
        parse(setting).map_err(refuse).ok()
    }

    fn refuse_kind(&mut self, key: &str, setting: &Setting, expected: &str) {
        let (expected, found) = (expected.to_owned(), setting.value.kind().to_owned());
        self.refuse(key, setting.location.clone(), Problem::Found { expected, found });
    }
}

fn full_key(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

fn split(text: &str, location: &Location) -> Vec<Setting> {
    let item =
        |text: &str| Setting { value: Value::Untyped(text.trim().to_owned()), location: location.clone() };
    text.split(',').map(item).collect()
}
