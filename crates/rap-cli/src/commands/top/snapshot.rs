//! A moment of a runtime: its metrics, the threads that need a person, active threads and open calls.

use std::collections::BTreeMap;
use std::fmt::Write;

use rap_api::client::{Client, Error};
use rap_api::{Calls, Inbox, ListedCall, Question, QuestionKind, Status, Thread, Threads, Time};

use crate::status_text::{self, grouped};
use crate::table::{Table, one_line, terminal_width};
use crate::time_format::{relative, short_duration};

/// Maximum number of rows of each list that are requested.
const ROWS: usize = 100;

/// Values of a metric with their labels.
type Samples = Vec<(BTreeMap<String, String>, f64)>;

pub(super) struct Snapshot {
    pub(super) at: Time,
    metrics: BTreeMap<String, Samples>,
    pub(super) questions: Vec<Question>,
    pub(super) failed: Vec<Thread>,
    pub(super) active: Vec<Thread>,
    pub(super) calls: Vec<ListedCall>,
}

impl Snapshot {
    pub(super) async fn fetch(client: &Client) -> Result<Snapshot, Error> {
        let threads = |status: &'static str| async move {
            let filters = [("status", status), ("order", "newest")];
            client.list::<Threads>(&filters, Some(ROWS)).await.map(|page| page.threads)
        };
        let metrics = parse(&client.metrics().await?);
        let mut questions = client.list::<Inbox>(&[], Some(ROWS)).await?.items;
        questions.sort_by_key(|question| question.asked_at);
        let mut active = threads("running").await?;
        active.extend(threads("waiting").await?);
        let mut failed = threads("failed").await?;
        // A thread that needs a person without a question is paused.
        let paused = threads("needs_you").await?.into_iter().filter(|thread| thread.why.is_some());
        failed.extend(paused);
        let mut calls = client.list::<Calls>(&[], Some(ROWS)).await?.calls;
        calls.sort_by_key(|call| call.since);
        Ok(Snapshot { at: Time::now(), metrics, questions, failed, active, calls })
    }

    /// Returns the sum of the samples of a metric that have a label.
    fn sum(&self, metric: &str, (name, value): (&str, &str)) -> f64 {
        let samples = self.metrics.get(metric).into_iter().flatten();
        let matching = samples.filter(|(labels, _)| labels.get(name).is_some_and(|found| found == value));
        matching.map(|(_, value)| value).sum()
    }

    /// Number of threads by status, those that need attention first.
    pub(super) fn threads(&self) -> Vec<(Status, u64)> {
        let order = [
            Status::NeedsYou,
            Status::Failed,
            Status::Running,
            Status::Waiting,
            Status::Idle,
            Status::Closed,
        ];
        let count = |status: Status| (status, self.sum("rap_threads", ("status", status.as_str())) as u64);
        order.map(count).to_vec()
    }

    /// Work by kind: in progress, and waiting.
    pub(super) fn work(&self) -> Vec<(&'static str, u64, u64)> {
        let kinds = [
            ("model requests", "ask"),
            ("invocations", "invoke"),
            ("answers", "answer"),
            ("status checks", "check"),
        ];
        let work = |(name, kind): (&'static str, &str)| {
            let in_progress = self.sum("rap_effects_under_way", ("kind", kind)) as u64;
            (name, in_progress, self.sum("rap_effects_waiting", ("kind", kind)) as u64)
        };
        kinds.map(work).to_vec()
    }

    /// Requests to the model by outcome.
    pub(super) fn requests(&self) -> [(&'static str, u64); 3] {
        ["answered", "failed", "refused"]
            .map(|outcome| (outcome, self.sum("rap_model_questions_total", ("outcome", outcome)) as u64))
    }

    /// Tokens in, of these cached, and out.
    pub(super) fn tokens(&self) -> [u64; 3] {
        ["input", "cached", "output"].map(|kind| self.sum("rap_model_tokens_total", ("kind", kind)) as u64)
    }

    pub(super) fn cost(&self) -> f64 {
        self.metrics
            .get("rap_model_cost_dollars_total")
            .into_iter()
            .flatten()
            .map(|(_, dollars)| dollars)
            .sum()
    }

    /// Number of deliveries that were refused or given up.
    pub(super) fn failed_deliveries(&self) -> u64 {
        let failed = ["refused", "given_up"];
        failed.map(|outcome| self.sum("rap_deliveries_total", ("outcome", outcome)) as u64).iter().sum()
    }

    /// Tokens per minute since an earlier snapshot.
    pub(super) fn tokens_per_minute(&self, earlier: &Snapshot) -> u64 {
        let all = |snapshot: &Snapshot| snapshot.tokens()[0] + snapshot.tokens()[2];
        let seconds = self.at.since(earlier.at).as_secs_f64().max(0.001);
        (all(self).saturating_sub(all(earlier)) as f64 * 60.0 / seconds).round() as u64
    }

    /// Rows about what waits for a person: questions, then failures and pauses.
    pub(super) fn for_people(&self, now: Time) -> Vec<[String; 4]> {
        let question = |question: &Question| {
            let what = match &question.kind {
                QuestionKind::Choice { prompt, choices, .. } => format!("{prompt} {}", choices.join(", ")),
                QuestionKind::SignIn { .. } => "sign in; the address is shown by: rap inbox ls".into(),
                QuestionKind::Unknown => "a question that this version of rap does not know".into(),
            };
            let since = short_duration(now.since(question.asked_at));
            [question.thread_id.clone(), since, question.tool.clone(), what]
        };
        let failed = |thread: &Thread| {
            let why = status_text::with_status_prefix(
                thread.status,
                thread.why.as_deref().unwrap_or("unknown reason"),
            );
            let since = short_duration(now.since(thread.updated_at));
            [thread.id.clone(), since, title(thread), why]
        };
        let rows = self.questions.iter().map(question).chain(self.failed.iter().map(failed));
        rows.map(|row| row.map(|cell| one_line(&cell))).collect()
    }

    /// Rows about threads that are running or waiting.
    pub(super) fn active_threads(&self, now: Time) -> Vec<[String; 4]> {
        let row = |thread: &Thread| {
            let status = status_text::label(thread.status).to_owned();
            [thread.id.clone(), status, title(thread), status_text::waiting_for(thread, now)]
        };
        self.active.iter().map(row).map(|row| row.map(|cell| one_line(&cell))).collect()
    }

    /// Rows about open calls, oldest first.
    pub(super) fn open_calls(&self, now: Time) -> Vec<[String; 4]> {
        let row = |call: &ListedCall| {
            let state = match call {
                ListedCall { needs_approval: true, .. } => "waits for approval".into(),
                ListedCall { last_attempt: Some(outcome), acknowledged_at: None, .. } => {
                    format!("not accepted: {outcome}")
                }
                ListedCall { overdue: true, .. } => "overdue".into(),
                _ => "running".into(),
            };
            [call.thread_id.clone(), short_duration(now.since(call.since)), call.tool.clone(), state]
        };
        self.calls.iter().map(row).map(|row| row.map(|cell| one_line(&cell))).collect()
    }

    /// Returns the whole snapshot as text.
    pub(super) fn to_text(&self, now: Time) -> String {
        let mut text = String::new();
        let threads: Vec<String> = self
            .threads()
            .iter()
            .map(|(status, count)| format!("{} {count}", status_text::label(*status)))
            .collect();
        let work: Vec<String> = self
            .work()
            .iter()
            .map(|(name, in_progress, waiting)| {
                format!("{name} {in_progress} in progress, {waiting} waiting")
            })
            .collect();
        let requests: Vec<String> =
            self.requests().iter().map(|(outcome, count)| format!("{outcome} {}", grouped(*count))).collect();
        let [input, cached, output] = self.tokens().map(grouped);
        // Writing to a string does not fail.
        writeln!(text, "threads: {}", threads.join(", ")).ok();
        writeln!(text, "work: {}", work.join("; ")).ok();
        writeln!(text, "model requests: {}", requests.join(", ")).ok();
        writeln!(text, "tokens: {input} in ({cached} cached), {output} out; cost ${:.4}", self.cost()).ok();
        writeln!(text, "failed deliveries: {}", grouped(self.failed_deliveries())).ok();
        let lists = [
            ("needs a person", ["THREAD", "SINCE", "TOOL OR TITLE", "WHAT"], self.for_people(now)),
            ("active threads", ["THREAD", "STATUS", "TITLE", "WAITING FOR"], self.active_threads(now)),
            ("open calls", ["THREAD", "AGE", "TOOL", "STATE"], self.open_calls(now)),
        ];
        for (name, headings, rows) in lists {
            writeln!(text, "\n{name}: {}", rows.len()).ok();
            let mut table = Table::new(headings);
            let some = !rows.is_empty();
            rows.into_iter().for_each(|row| table.row(row));
            if some {
                text.push_str(&table.render(terminal_width()));
            }
        }
        text
    }
}

fn title(thread: &Thread) -> String {
    thread.title.clone().unwrap_or_else(|| format!("updated {}", relative(thread.updated_at, Time::now())))
}

/// Parses metrics in the Prometheus text format.
fn parse(text: &str) -> BTreeMap<String, Samples> {
    let mut metrics: BTreeMap<String, Samples> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((sample, value)) = line.rsplit_once(' ') else { continue };
        let Ok(value) = value.parse() else { continue };
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        metrics.entry(name.to_owned()).or_default().push((parse_labels(labels), value));
    }
    metrics
}

/// Parses the labels of a sample, such as `kind="input",model="m"}`.
fn parse_labels(mut text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    while let Some((name, rest)) = text.split_once("=\"") {
        let (mut value, mut end, mut escaped) = (String::new(), rest.len(), false);
        for (at, c) in rest.char_indices() {
            match c {
                '"' if !escaped => {
                    end = at + 1;
                    break;
                }
                '\\' if !escaped => {
                    escaped = true;
                    continue;
                }
                'n' if escaped => value.push('\n'),
                c => value.push(c),
            }
            escaped = false;
        }
        labels.insert(name.trim_start_matches(',').to_owned(), value);
        text = &rest[end..];
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_up_by_name_and_label() {
        let text = "# HELP rap_threads Threads.\nrap_threads{status=\"idle\"} 3\n\
                    rap_deliveries_total{kind=\"callback\",outcome=\"refused\"} 2\n\
                    rap_model_tokens_total{kind=\"input\",agent=\"a \\\"b\\\" {c}\",model=\"m\"} 4\n\
                    rap_model_tokens_total{kind=\"input\",agent=\"output\",model=\"m\"} 5\n\
                    rap_model_cost_dollars_total{agent=\"a\"} 0.5\nrap_model_cost_dollars_total{agent=\"b\"} 0.25\nnoise\n";
        let snapshot = Snapshot {
            at: Time::from_millis(0),
            metrics: parse(text),
            questions: Vec::new(),
            failed: Vec::new(),
            active: Vec::new(),
            calls: Vec::new(),
        };
        assert_eq!(snapshot.sum("rap_threads", ("status", "idle")), 3.0);
        assert_eq!((snapshot.failed_deliveries(), snapshot.tokens(), snapshot.cost()), (2, [9, 0, 0], 0.75));
        assert_eq!(
            parse_labels(r#"a="x\\\"\n",b=""}"#),
            [("a", "x\\\"\n"), ("b", "")].map(|(name, value)| (name.into(), value.into())).into()
        );
        // An older runtime has no labels here.
        assert_eq!(parse("rap_model_cost_dollars_total 0.5\n")["rap_model_cost_dollars_total"][0].1, 0.5);
    }
}
