//! Comparison of JSON values as JSON Schema defines it, and their texts in errors.

use std::cmp::Ordering;
use std::io;

use serde_json::{Map, Number, Value};

/// Number of bytes of text that are compared in one step.
pub(super) const BYTES_PER_STEP: u64 = 16;

/// Maximum length of a value in the description of a violation, in bytes of JSON.
const SHOWN_BYTES: usize = 120;

/// Returns the steps that a comparison of a value with another one takes at most.
pub(super) fn size(value: &Value) -> u64 {
    let text = |text: &str| 1 + text.len() as u64 / BYTES_PER_STEP;
    match value {
        Value::String(string) => text(string),
        Value::Array(items) => 1 + items.iter().map(size).sum::<u64>(),
        Value::Object(fields) => 1 + fields.iter().map(|(name, value)| text(name) + size(value)).sum::<u64>(),
        _ => 1,
    }
}

/// Total order of JSON values. Numbers are equal if their mathematical values are, objects if their members are.
pub(super) fn order(left: &Value, right: &Value) -> Ordering {
    let rank = |value: &Value| match value {
        Value::Null => 0,
        Value::Bool(_) => 1,
        Value::Number(_) => 2,
        Value::String(_) => 3,
        Value::Array(_) => 4,
        Value::Object(_) => 5,
    };
    match (left, right) {
        (Value::Bool(left), Value::Bool(right)) => left.cmp(right),
        (Value::Number(left), Value::Number(right)) => order_numbers(left, right),
        (Value::String(left), Value::String(right)) => left.cmp(right),
        (Value::Array(left), Value::Array(right)) => {
            let pairs = left.iter().zip(right).map(|(left, right)| order(left, right));
            first_difference(pairs).then(left.len().cmp(&right.len()))
        }
        (Value::Object(left), Value::Object(right)) => {
            let (left, right) = (sorted(left), sorted(right));
            let pairs = left.iter().zip(&right);
            let pairs = pairs.map(|(left, right)| left.0.cmp(right.0).then_with(|| order(left.1, right.1)));
            first_difference(pairs).then(left.len().cmp(&right.len()))
        }
        _ => rank(left).cmp(&rank(right)),
    }
}

fn sorted(fields: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut fields: Vec<_> = fields.iter().collect();
    fields.sort_unstable_by_key(|(name, _)| *name);
    fields
}

fn first_difference(mut pairs: impl Iterator<Item = Ordering>) -> Ordering {
    pairs.find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

pub(super) fn order_numbers(left: &Number, right: &Number) -> Ordering {
    let ((left, left_rest), (right, right_rest)) = (exact(left), exact(right));
    left.cmp(&right).then(left_rest.total_cmp(&right_rest))
}

/// Splits a number into its integral part and the rest. A number beyond the range of `i128` is all rest.
fn exact(number: &Number) -> (i128, f64) {
    if let Some(number) = number.as_i128() {
        return (number, 0.0);
    }
    let number = number.as_f64().unwrap_or(f64::INFINITY);
    // 2^126 is exact, and every f64 below it has an i128 as its integral part.
    const RANGE: f64 = 85_070_591_730_234_615_865_843_651_857_942_052_864.0;
    if number >= RANGE {
        (i128::MAX, number)
    } else if number <= -RANGE {
        (i128::MIN, number)
    } else {
        let floor = number.floor();
        (floor as i128, number - floor)
    }
}

/// Text of a value in an error. A long value is not repeated, and is not converted to text in full either.
pub(super) fn shown(value: &Value) -> String {
    struct Bounded(Vec<u8>);
    impl io::Write for Bounded {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.len() + bytes.len() > SHOWN_BYTES {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.0.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut text = Bounded(Vec::new());
    match serde_json::to_writer(&mut text, value) {
        Ok(()) => String::from_utf8_lossy(&text.0).into_owned(),
        Err(_) => "the value".into(),
    }
}
