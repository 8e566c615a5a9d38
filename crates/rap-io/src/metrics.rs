//! Metrics and the Prometheus text format.
//!
//! Counting costs one atomic addition and allocates nothing. Labels are fixed in the code or come from the configuration, so
//! that the size of the output does not depend on what clients and tools send.

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Media type of the Prometheus text format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Histogram buckets for durations from less than a millisecond to minutes, in seconds.
pub const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// Unit of the stored sums, which are integers.
const MILLIONTH: f64 = 1e-6;

/// A counter that only increases.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds 1.
    pub fn count(&self) {
        self.add(1);
    }

    /// Adds `more`.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Returns the current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A histogram: for each bound, the number of values that are not greater.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and one for values above all bounds.
    buckets: Box<[Counter]>,
    millionths: Counter,
}

impl Histogram {
    /// Creates a histogram with these bounds, in ascending order.
    pub fn new(bounds: &'static [f64]) -> Self {
        let buckets = (0..=bounds.len()).map(|_| Counter::default()).collect();
        Histogram { bounds, buckets, millionths: Counter::default() }
    }

    /// Creates a histogram of durations, with the buckets [`SECONDS`].
    pub fn of_seconds() -> Self {
        Histogram::new(SECONDS)
    }

    /// Counts a value.
    pub fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.buckets[bucket].count();
        self.millionths.add((value / MILLIONTH) as u64);
    }

    /// Counts a duration, in seconds.
    pub fn observe_duration(&self, time: Duration) {
        self.observe(time.as_secs_f64());
    }
}

/// Returns a label of a sample. Its value may be any text.
pub fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

/// Builder of the Prometheus text format. Each metric name must be added only once.
#[derive(Debug, Default)]
pub struct Exposition(String);

impl Exposition {
    /// Adds a counter. Its name ends in `_total`.
    pub fn counter(&mut self, name: &str, help: &str, counter: &Counter) {
        self.family(name, "counter", help, [("", counter.get())]);
    }

    /// Adds a gauge.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help, [("", value)]);
    }

    /// Adds the samples of one metric, which differ by their labels, such as `kind="ask"`. Labels with values that are not
    /// constants of the program are made by [`label`].
    pub fn family<L: AsRef<str>, V: Display>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) {
        self.begin(name, kind, help);
        for (labels, value) in samples {
            match labels.as_ref() {
                "" => self.line(format_args!("{name} {value}")),
                labels => self.line(format_args!("{name}{{{labels}}} {value}")),
            }
        }
    }

    /// Adds a histogram.
    pub fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.begin(name, "histogram", help);
        let mut count = 0;
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, bucket) in bounds.zip(&histogram.buckets) {
            count += bucket.get();
            self.line(format_args!("{name}_bucket{{le=\"{bound}\"}} {count}"));
        }
        self.line(format_args!("{name}_sum {}", histogram.millionths.get() as f64 * MILLIONTH));
        self.line(format_args!("{name}_count {count}"));
    }

    /// Returns the text.
    pub fn finish(self) -> String {
        self.0
    }

    fn begin(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.0, "{line}").expect("bug: writing to a String cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_the_values_up_to_each_bound() {
        let histogram = Histogram::new(&[0.5, 1.0]);
        for value in [0.25, 0.5, 0.75, 3.0] {
            histogram.observe(value);
        }
        let mut text = Exposition::default();
        text.histogram("x_seconds", "Times.", &histogram);
        let lines = [
            "# HELP x_seconds Times.",
            "# TYPE x_seconds histogram",
            "x_seconds_bucket{le=\"0.5\"} 2",
            "x_seconds_bucket{le=\"1\"} 3",
            "x_seconds_bucket{le=\"+Inf\"} 4",
            "x_seconds_sum 4.5",
            "x_seconds_count 4",
        ];
        assert_eq!(text.finish().lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn samples_of_a_metric_differ_by_their_labels() {
        let (counter, mut text) = (Counter::default(), Exposition::default());
        counter.add(2);
        text.counter("a_total", "All.", &counter);
        text.family("b", "gauge", "Some.", [("kind=\"x\"", 1), ("kind=\"y\"", 2)]);
        let lines = "# HELP a_total All.\n# TYPE a_total counter\na_total 2\n\
                     # HELP b Some.\n# TYPE b gauge\nb{kind=\"x\"} 1\nb{kind=\"y\"} 2\n";
        assert_eq!(text.finish(), lines);
    }

    #[test]
    fn the_value_of_a_label_may_be_any_text() {
        assert_eq!(label("model", "gpt-5"), "model=\"gpt-5\"");
        assert_eq!(label("agent", "a\"b\\c\nd"), r#"agent="a\"b\\c\nd""#);
    }
}
