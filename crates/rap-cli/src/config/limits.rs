//! Reads limits, and writes their defaults. The limits themselves are a table in `rap_agent`.

use rap_agent::{Limit, LimitValue, Valid};

use super::document::Setting;
use super::mistake::Problem;
use super::section::Section;
use super::value::{
    Zero, count, duration, optional_count, optional_duration, size, write_duration, write_size,
};

/// Reads the limits of a table. A limit that is not set or is invalid keeps its value.
pub(super) fn read<L>(table: &'static [Limit<L>], limits: &mut L, section: &mut Section<'_>) {
    for limit in table {
        if let Some(former) = limit.former_key {
            section.accept_former(former, limit.key);
        }
        if let Some(value) = section.read(limit.key, |setting| parse(&limit.valid, setting)) {
            (limit.set)(limits, value);
        }
    }
}

/// Reads the value of a limit.
pub(super) fn parse(valid: &Valid, setting: &Setting) -> Result<LimitValue, Problem> {
    Ok(match valid {
        Valid::Count(range) => LimitValue::Number(count(range.clone())(setting)?.into()),
        Valid::CountOrNone => {
            optional_count(setting)?.map_or(LimitValue::None, |count| LimitValue::Number(count.into()))
        }
        Valid::Size(range) => LimitValue::Number(size(range.clone())(setting)?),
        Valid::Duration => LimitValue::Duration(duration(Zero::Allowed)(setting)?),
        Valid::DurationAboveZero => LimitValue::Duration(duration(Zero::Refused)(setting)?),
        Valid::DurationOrNone => optional_duration(setting)?.map_or(LimitValue::None, LimitValue::Duration),
    })
}

/// Returns the key, the default as TOML, and the description of every limit.
pub(crate) fn defaults<L: Default>(
    table: &'static [Limit<L>],
) -> impl Iterator<Item = (&'static str, String, String)> {
    let limits = L::default();
    table.iter().map(move |limit| (limit.key, to_toml(&limit.valid, (limit.get)(&limits)), limit.about()))
}

fn to_toml(valid: &Valid, value: LimitValue) -> String {
    match (value, valid) {
        (LimitValue::Number(bytes), Valid::Size(_)) => format!("{:?}", write_size(bytes)),
        (LimitValue::Number(number), _) => number.to_string(),
        (LimitValue::Duration(duration), _) => format!("{:?}", write_duration(duration)),
        (LimitValue::None, _) => "\"none\"".into(),
    }
}
