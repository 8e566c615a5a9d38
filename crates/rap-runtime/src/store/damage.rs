//! Damage in stored rows: how it is found, and what people see of it.
//!
//! A damaged thread is quarantined (`set_aside`): it is shown as failed with the reason, and takes no steps that need
//! the damaged rows. Nothing of it is overwritten, so that it can be repaired.

use std::error::Error as StdError;

use rap_agent::{Entry, Item, Seq};
use rap_protocol::Timestamp;

use super::stored::to_json;

/// Damage in the rows of a thread.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Damage {
    #[error("its stored state cannot be read: {0}")]
    Head(serde_json::Error),
    #[error("the stored list of its ancestors cannot be read: {0}")]
    Ancestors(serde_json::Error),
    /// `body` is the entry as it is stored.
    #[error("entry {seq} of its history cannot be read: {error}")]
    Entry { seq: Seq, error: serde_json::Error, body: String },
    #[error("entry {0} of its history is missing")]
    MissingEntry(Seq),
    #[error("entries {0} to {1} of its history are missing")]
    MissingEntries(Seq, Seq),
    #[error("the row of its thread is missing")]
    MissingThread,
}

impl Damage {
    /// Reads an entry of a history.
    pub(super) fn check_entry(seq: Seq, body: &str) -> Result<Entry, Damage> {
        serde_json::from_str(body).map_err(|error| Damage::Entry { seq, error, body: body.to_owned() })
    }

    /// Returns the damage of a history in which the entries from `first` to `last` are missing.
    fn missing(first: Seq, last: Seq) -> Damage {
        if first == last { Damage::MissingEntry(first) } else { Damage::MissingEntries(first, last) }
    }
}

/// Returns why a thread is shown as failed, from the error that its rows caused.
pub(crate) fn reason(error: &(dyn StdError + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    format!("the stored data of this thread is damaged: {cause}. `rap doctor` says what can be done")
}

/// Checks that a history has every entry of a range.
pub(super) struct Sequence {
    last: Seq,
}

impl Sequence {
    /// Begins after an entry.
    pub(super) fn after(seq: Seq) -> Sequence {
        Sequence { last: seq }
    }

    /// Takes the next entry, which fails if entries before it are missing.
    pub(super) fn take(&mut self, seq: Seq) -> Result<(), Damage> {
        let expected = self.last + 1;
        self.last = seq;
        if seq > expected { Err(Damage::missing(expected, seq - 1)) } else { Ok(()) }
    }

    /// Ends with an entry, which fails if it or entries before it are missing.
    pub(super) fn end(mut self, up_to: Seq) -> Result<(), Damage> {
        self.take(up_to + 1)
    }
}

/// Returns the entries of a page as they are stored: those that can be read in their present form, all others unchanged.
pub(super) fn as_stored(rows: Vec<(Seq, Result<Entry, Damage>)>) -> Vec<(Seq, String)> {
    let stored = |read: Result<Entry, Damage>| match read {
        Ok(entry) => Some(to_json(&entry)),
        Err(Damage::Entry { body, .. }) => Some(body),
        Err(_) => None,
    };
    rows.into_iter().filter_map(|(seq, read)| Some((seq, stored(read)?))).collect()
}

/// Returns the entries of a page for people. A notice stands for each entry that cannot be read, and for missing ones.
pub(super) fn for_people(after: Seq, rows: Vec<(Seq, Result<Entry, Damage>)>) -> Vec<(Seq, Entry)> {
    let (mut sequence, mut at) = (Sequence::after(after), Timestamp(0));
    let mut entries = Vec::with_capacity(rows.len());
    let notice = |damage: Damage, at| Entry { at, item: Item::Notice { text: format!("damaged: {damage}") } };
    for (seq, read) in rows {
        let first_missing = sequence.last + 1;
        if let Err(missing) = sequence.take(seq) {
            entries.push((first_missing, notice(missing, at)));
        }
        let entry = read.unwrap_or_else(|damage| notice(damage, at));
        at = entry.at;
        entries.push((seq, entry));
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str) -> Entry {
        Entry { at: Timestamp(7), item: Item::Notice { text: text.into() } }
    }

    fn broken(seq: Seq) -> Damage {
        Damage::check_entry(seq, "{").unwrap_err()
    }

    #[test]
    fn a_history_with_missing_entries_is_not_whole() {
        let whole = |numbers: &[Seq], up_to| {
            let mut sequence = Sequence::after(2);
            numbers.iter().try_for_each(|seq| sequence.take(*seq))?;
            sequence.end(up_to)
        };
        assert!(whole(&[3, 4], 4).is_ok() && whole(&[], 2).is_ok());
        assert!(matches!(whole(&[4], 4), Err(Damage::MissingEntry(3))));
        assert!(matches!(whole(&[3, 7], 7), Err(Damage::MissingEntries(4, 6))));
        assert!(matches!(whole(&[3], 5), Err(Damage::MissingEntries(4, 5))));
    }

    #[test]
    fn people_see_notices_in_place_of_damaged_entries() {
        let rows = vec![(1, Ok(entry("one"))), (2, Err(broken(2))), (5, Ok(entry("five")))];
        let shown: Vec<(Seq, String)> = for_people(0, rows)
            .into_iter()
            .map(|(seq, entry)| match entry.item {
                Item::Notice { text } => (seq, text),
                _ => unreachable!(),
            })
            .collect();
        assert_eq!((shown[0].0, shown[0].1.as_str()), (1, "one"));
        assert!(shown[1].0 == 2 && shown[1].1.contains("entry 2 of its history cannot be read"), "{shown:?}");
        assert!(shown[2].0 == 3 && shown[2].1.contains("entries 3 to 4"), "{shown:?}");
        assert_eq!((shown[3].0, shown[3].1.as_str()), (5, "five"));
    }

    #[test]
    fn the_reason_names_the_damage() {
        let error = crate::store::Error::Unreadable(Box::new(Damage::MissingEntry(4)));
        assert_eq!(
            reason(&error),
            "the stored data of this thread is damaged: entry 4 of its history is missing. \
             `rap doctor` says what can be done"
        );
    }
}
