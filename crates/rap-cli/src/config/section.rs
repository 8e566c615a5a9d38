//! Reading a table key by key. A mistake is noted and reading goes on, so that all of them are told at once.
//!
//! Every key that is asked for is a known key; what nobody asked for is a mistake.

use std::collections::BTreeSet;

use super::document::{Setting, Table, Value};
use super::mistake::{Mistake, Place, Problem};
use crate::nearest::nearest;

/// What is noted while tables are read.
#[derive(Default)]
pub(super) struct Notes {
    pub(super) mistakes: Vec<Mistake>,
    /// Every key that was asked for, with its section.
    pub(super) known: BTreeSet<String>,
}

/// A table that is being read. To be finished, or unknown keys go unnoticed.
#[must_use]
pub(super) struct Section<'a> {
    name: &'static str,
    table: Table,
    known: Vec<&'static str>,
    notes: &'a mut Notes,
}

impl<'a> Section<'a> {
    /// The name is empty for the whole document.
    pub(super) fn new(name: &'static str, table: Table, notes: &'a mut Notes) -> Self {
        Section { name, table, known: Vec::new(), notes }
    }

    /// What `parse` makes of a key. None if it is not set, and none if it is wrong.
    pub(super) fn read<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&Setting) -> Result<T, Problem>,
    ) -> Option<T> {
        let setting = self.take(key)?;
        self.parsed(key, &setting, parse)
    }

    /// The same with a list, each of whose items has to be right. A variable and a flag separate their items by commas.
    pub(super) fn read_list<T>(
        &mut self,
        key: &'static str,
        expected: &str,
        parse: impl Fn(&Setting) -> Result<T, Problem>,
    ) -> Option<Vec<T>> {
        let setting = self.take(key)?;
        let items = match setting.value {
            Value::List(items) => items,
            Value::Loose(text) => split(&text, &setting.place),
            _ => {
                self.refuse_kind(key, &setting, expected);
                return None;
            }
        };
        let parsed: Vec<Option<T>> = items.iter().map(|item| self.parsed(key, item, &parse)).collect();
        parsed.into_iter().collect()
    }

    /// A table within this one; empty if there is none.
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

    /// The tables of an array, each with its place.
    pub(super) fn tables(&mut self, key: &'static str) -> Vec<(Place, Table)> {
        let mut tables = Vec::new();
        let Some(setting) = self.take(key) else { return tables };
        let expected = format!("an array of tables, written [[{key}]]");
        let Value::List(items) = setting.value else {
            self.refuse_kind(key, &setting, &expected);
            return tables;
        };
        for Setting { value, place } in items {
            match value {
                Value::Table(table) => tables.push((place, table)),
                value => self.refuse_kind(key, &Setting { value, place }, &expected),
            }
        }
        tables
    }

    /// Refuses a key that is planned and not built.
    pub(super) fn not_yet(&mut self, key: &'static str, what: &'static str, instead: &'static str) {
        if let Some(setting) = self.table.remove(key) {
            self.refuse(key, setting.place, Problem::NotYet { what, instead });
        }
    }

    /// Takes keys for known that are read elsewhere.
    pub(super) fn know(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    /// Where a key that was not read yet was set.
    pub(super) fn place_of(&self, key: &str) -> Option<Place> {
        self.table.get(key).map(|setting| setting.place.clone())
    }

    /// Notes a mistake.
    pub(super) fn refuse(&mut self, key: &str, place: Place, problem: Problem) {
        self.notes.mistakes.push(Mistake { place, key: full(self.name, key), problem });
    }

    /// Notes every key that nobody asked for.
    pub(super) fn finish(mut self) {
        for (key, setting) in std::mem::take(&mut self.table) {
            match nearest(&key, &self.known) {
                Some(known) => self.refuse(&key, setting.place, Problem::Misspelt(known)),
                // A name like RAP_SERVER_PORT may have been set by something else, a cluster for instance.
                None if matches!(setting.place, Place::Variable(_)) => {}
                None => self.refuse(&key, setting.place, Problem::Unknown),
            }
        }
        self.notes.known.extend(self.known.iter().map(|key| full(self.name, key)));
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
        let refuse = |problem| self.refuse(key, setting.place.clone(), problem);
        parse(setting).map_err(refuse).ok()
    }

    fn refuse_kind(&mut self, key: &str, setting: &Setting, expected: &str) {
        let (expected, found) = (expected.to_owned(), setting.value.kind().to_owned());
        self.refuse(key, setting.place.clone(), Problem::Found { expected, found });
    }
}

fn full(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

fn split(text: &str, place: &Place) -> Vec<Setting> {
    let item = |text: &str| Setting { value: Value::Loose(text.trim().to_owned()), place: place.clone() };
    text.split(',').map(item).collect()
}
