//! Normative requirements of the specification, read from `requirements.tsv`.

use std::fmt;
use std::sync::LazyLock;

use serde::{Serialize, Serializer};

/// Normative sentence of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Requirement {
    /// Id: two letters and a number, such as `TC-04`.
    pub id: &'static str,
    /// Requirement level, such as MUST or SHOULD.
    pub level: Level,
    /// Implementations that have to meet the requirement.
    pub who: Who,
    /// Text of the requirement.
    pub text: &'static str,
}

/// Level of a requirement, as in RFC 2119.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// MUST.
    Must,
    /// MUST NOT.
    MustNot,
    /// SHOULD.
    Should,
    /// SHOULD NOT.
    ShouldNot,
    /// MAY.
    May,
    /// Derived from other sentences or from the examples of the specification.
    Derived,
}

/// Implementations that have to meet a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// Tool servers.
    Tool,
    /// Runtimes.
    Runtime,
    /// Tool servers and runtimes.
    Both,
}

static ALL: LazyLock<Vec<Requirement>> = LazyLock::new(|| {
    let lines = include_str!("../requirements.tsv").lines().skip(1);
    lines.map(|line| parse(line).unwrap_or_else(|| panic!("bug: requirements.tsv: {line}"))).collect()
});

/// Returns all requirements, in the order of the specification.
pub fn all() -> &'static [Requirement] {
    &ALL
}

/// Returns the requirement with this id.
pub fn find(id: &str) -> Option<&'static Requirement> {
    all().iter().find(|requirement| requirement.id == id)
}

fn parse(line: &'static str) -> Option<Requirement> {
    let mut fields = line.split('\t');
    let mut field = || fields.next();
    Some(Requirement {
        id: field()?,
        level: match field()? {
            "MUST" => Level::Must,
            "MUST NOT" => Level::MustNot,
            "SHOULD" => Level::Should,
            "SHOULD NOT" => Level::ShouldNot,
            "MAY" => Level::May,
            "derived" => Level::Derived,
            _ => return None,
        },
        who: match field()? {
            "tool" => Who::Tool,
            "runtime" => Who::Runtime,
            "both" => Who::Both,
            _ => return None,
        },
        text: field()?,
    })
}

impl Level {
    /// Returns true for MUST and MUST NOT: an implementation that violates such a requirement does not conform.
    pub fn is_must(self) -> bool {
        matches!(self, Level::Must | Level::MustNot)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Must => "MUST",
            Level::MustNot => "MUST NOT",
            Level::Should => "SHOULD",
            Level::ShouldNot => "SHOULD NOT",
            Level::May => "MAY",
            Level::Derived => "derived",
        })
    }
}

impl Serialize for Level {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_line_is_a_requirement_with_a_unique_id() {
        assert_eq!(all().len(), include_str!("../requirements.tsv").lines().count() - 1);
        let ids: HashSet<&str> = all().iter().map(|requirement| requirement.id).collect();
        assert_eq!(ids.len(), all().len());
        assert_eq!(find("TC-05").map(|found| (found.level, found.who)), Some((Level::MustNot, Who::Tool)));
        assert_eq!(find("XX-01"), None);
    }

    #[test]
    fn a_derived_prohibition_keeps_its_not() {
        // The level of these does not say it.
        for id in ["TC-06", "CN-06", "TR-05"] {
            let requirement = find(id).unwrap();
            assert_eq!(requirement.level, Level::Derived);
            assert!(requirement.text.starts_with("Do not "), "{id}: {}", requirement.text);
        }
    }
}
