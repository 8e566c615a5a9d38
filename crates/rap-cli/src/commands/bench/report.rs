//! The figures of a benchmark: as text, as JSON, and as plots.

use std::fmt::Write;
use std::time::Duration;

use rap_io::bench::Figure;
use rap_runtime::measure::waiting::Sleeping;
use serde::Serialize;

use super::plot::{Axis, Plot};

/// A rate and its latencies in microseconds.
#[derive(Serialize)]
pub(super) struct Rate {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    /// Latencies in steps of one percent.
    percentiles_us: Vec<f64>,
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl Rate {
    pub(super) fn new(figure: &Figure) -> Rate {
        Rate {
            per_second: figure.per_second,
            p50_us: microseconds(figure.p50),
            p99_us: microseconds(figure.p99),
            percentiles_us: figure.percentiles.iter().copied().map(microseconds).collect(),
        }
    }

    fn line(&self, name: &str) -> String {
        let Rate { per_second, p50_us, p99_us, .. } = self;
        format!("{name:<48} {per_second:>10.0} {:>9.2} ms {:>9.2} ms\n", p50_us / 1e3, p99_us / 1e3)
    }
}

/// Round trips of a number of threads at the same time.
#[derive(Serialize)]
pub(super) struct RoundTrips {
    threads: usize,
    #[serde(flatten)]
    rate: Rate,
}

impl RoundTrips {
    pub(super) fn new(threads: usize, figure: &Figure) -> RoundTrips {
        RoundTrips { threads, rate: Rate::new(figure) }
    }
}

/// Duration of a turn in a long conversation.
#[derive(Serialize)]
pub(super) struct Turn {
    turn: u64,
    p50_us: f64,
}

impl Turn {
    pub(super) fn new(turn: u64, took: Duration) -> Turn {
        Turn { turn, p50_us: microseconds(took) }
    }
}

/// Cost of threads that sleep.
#[derive(Serialize)]
pub(super) struct SleepingThreads {
    threads: u32,
    /// Memory of the process.
    resident_bytes: u64,
    /// Time from the start of the process to its first answer to a callback.
    first_answer_us: f64,
}

impl SleepingThreads {
    pub(super) fn new(threads: u32, slept: &Sleeping) -> SleepingThreads {
        let first_answer_us = microseconds(slept.first_answer);
        SleepingThreads { threads, resident_bytes: slept.resident, first_answer_us }
    }
}

/// A durable tool server beside a router without a handler, measured in turns.
#[derive(Serialize)]
pub(super) struct ToolServer {
    pub(super) router: Rate,
    pub(super) invocations: Rate,
    pub(super) share_of_router: f64,
    pub(super) results_per_second: f64,
    /// Times from the end of a handler to the callback with its result, one call after the other.
    pub(super) result_delay: Rate,
    pub(super) subscriptions: u64,
    pub(super) subscription_bytes: u64,
}

/// All figures of a run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) cores: usize,
    /// Number of threads or connections of `bare` and `router`.
    pub(super) compared: usize,
    pub(super) fdatasync: Rate,
    pub(super) bare_1: Rate,
    pub(super) bare: Rate,
    pub(super) router: Rate,
    pub(super) round_trips: Vec<RoundTrips>,
    pub(super) history: Vec<Turn>,
    pub(super) sleeping: Vec<SleepingThreads>,
    pub(super) tool_server: ToolServer,
}

impl Report {
    fn compared_trips(&self) -> Option<&RoundTrips> {
        self.round_trips.iter().find(|trips| trips.threads == self.compared)
    }

    /// Returns a table for people.
    pub(super) fn text(&self) -> String {
        let compared = self.compared;
        let mut text = format!("{:<48} {:>10} {:>12} {:>12}\n", "", "per second", "p50", "p99");
        text += &self.fdatasync.line("fdatasync of the disk");
        text += &self.bare_1.line("bare group commit of the same rows, 1 producer");
        text += &self.bare.line(&format!("bare group commit, {compared} producers"));
        text += &self.router.line(&format!("loopback POST, {compared} connections"));
        for RoundTrips { threads, rate } in &self.round_trips {
            text += &rate.line(&format!("durable round trips, threads: {threads}"));
        }
        let tool = &self.tool_server;
        text += &tool.router.line("router without a handler, 64 connections");
        text += &tool.invocations.line("durable invocations of a tool, 64 connections");
        text += "\n";
        let mut line = |line: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            writeln!(text, "{line}").ok();
        };
        if let Some(RoundTrips { rate, .. }) = self.compared_trips() {
            line(format_args!(
                "{compared} threads: {:.0} % of the bare group commit, p99 {:.1} times its p99",
                100.0 * rate.per_second / self.bare.per_second,
                rate.p99_us / self.bare.p99_us,
            ));
        }
        if let [first, .., last] = &self.history[..] {
            let times = last.p50_us / first.p50_us;
            line(format_args!("turn {} takes {times:.2} times as long as turn {}", last.turn, first.turn));
        }
        for SleepingThreads { threads, resident_bytes, first_answer_us } in &self.sleeping {
            let (megabytes, answer) = (*resident_bytes as f64 / 1e6, first_answer_us / 1e3);
            line(format_args!(
                "{threads} sleeping threads: {megabytes:.1} MB, first callback {answer:.0} ms after the start"
            ));
        }
        line(format_args!(
            "tool server: {:.0} % of the router, {:.0} results/s, delivered {:.2} ms after the handler's end, \
             {} subscriptions in {:.1} MB",
            100.0 * tool.share_of_router,
            tool.results_per_second,
            tool.result_delay.p50_us / 1e3,
            tool.subscriptions,
            tool.subscription_bytes as f64 / 1e6,
        ));
        line(format_args!(
            "{} cores; compare ratios within one run, not figures of different runs",
            self.cores
        ));
        text
    }

    /// Returns the names and contents of the plots.
    pub(super) fn plots(&self) -> [(&'static str, String); 4] {
        let trips = self.round_trips.iter().map(|trips| (trips.threads as f64, trips.rate.per_second));
        let bare = self.round_trips.iter().map(|trips| (trips.threads as f64, self.bare.per_second));
        let throughput = Plot {
            title: "Durable round trips per second",
            x: Axis { label: "threads", is_logarithmic: true },
            y: Axis { label: "per second", is_logarithmic: false },
            series: vec![("rap", trips.collect()), ("bare group commit", bare.collect())],
        };
        let distribution = |rate: &Rate| {
            let points = rate.percentiles_us.iter().enumerate();
            points.map(|(percent, time)| (percent as f64, time / 1e3)).collect::<Vec<_>>()
        };
        let mut series = vec![("bare group commit", distribution(&self.bare))];
        series.extend(self.compared_trips().map(|trips| ("rap", distribution(&trips.rate))));
        let latency = Plot {
            title: "Latency of durable round trips",
            x: Axis { label: "percent of the round trips", is_logarithmic: false },
            y: Axis { label: "milliseconds", is_logarithmic: false },
            series,
        };
        let memory =
            self.sleeping.iter().map(|slept| (f64::from(slept.threads), slept.resident_bytes as f64 / 1e6));
        let memory = Plot {
            title: "Memory of the process",
            x: Axis { label: "sleeping threads", is_logarithmic: true },
            y: Axis { label: "MB", is_logarithmic: false },
            series: vec![("rap", memory.collect())],
        };
        let turns = self.history.iter().map(|turn| (turn.turn as f64, turn.p50_us / 1e3));
        let history = Plot {
            title: "Time of a round trip in a long conversation",
            x: Axis { label: "turn", is_logarithmic: false },
            y: Axis { label: "milliseconds", is_logarithmic: false },
            series: vec![("median", turns.collect())],
        };
        [
            ("throughput.svg", throughput.svg()),
            ("latency.svg", latency.svg()),
            ("memory.svg", memory.svg()),
            ("history.svg", history.svg()),
        ]
    }
}
