//! Views that tools show: progress in one row that is redrawn, every other view in a line for each change.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rap_api::View;

use crate::table::{cut, one_line};
use crate::transcript::Line;

/// View type of progress.
const PROGRESS: &str = "progress";
/// Minimum time between two lines about one view. Of the changes in between, the last is shown.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of views that are remembered.
const VIEWS: usize = 100;
/// Maximum width of the content of a view in a line.
const SHORT: usize = 200;
/// Width of the bar of a progress.
const BAR: usize = 10;

#[derive(Debug, Default)]
pub(super) struct ToolViews {
    /// Progress by server.
    progress: BTreeMap<String, String>,
    /// Other views by server and type.
    others: BTreeMap<(String, String), Shown>,
}

#[derive(Debug)]
struct Shown {
    latest: String,
    /// Content that was printed last, and when.
    printed: Option<(String, Instant)>,
}

impl ToolViews {
    /// Takes a view. One that is older than the chat is not printed.
    pub(super) fn push(&mut self, view: &View, is_past: bool) {
        if view.view_type == PROGRESS {
            if !is_past {
                self.progress.insert(view.server.clone(), progress(view));
            }
            return;
        }
        let latest: String = view.content.to_string().chars().take(4 * SHORT).collect();
        let key = (view.server.clone(), view.view_type.clone());
        if self.others.len() >= VIEWS && !self.others.contains_key(&key) {
            self.others.pop_first();
        }
        let printed = is_past.then(|| (latest.clone(), Instant::now()));
        self.others
            .entry(key)
            .and_modify(|shown| shown.latest.clone_from(&latest))
            .or_insert(Shown { latest, printed });
    }

    /// Forgets progress, because no call is open.
    pub(super) fn calls_ended(&mut self) {
        self.progress.clear();
    }

    /// Returns a text for each progress.
    pub(super) fn progress(&self) -> impl Iterator<Item = String> {
        self.progress.values().cloned()
    }

    /// Returns the lines about views that have changed.
    pub(super) fn due(&mut self) -> Vec<Line> {
        let mut lines = Vec::new();
        for ((server, view_type), shown) in &mut self.others {
            let is_due = match &shown.printed {
                None => true,
                Some((printed, at)) => *printed != shown.latest && at.elapsed() >= PAUSE,
            };
            if is_due {
                shown.printed = Some((shown.latest.clone(), Instant::now()));
                let content = cut(&one_line(&shown.latest), SHORT);
                let what = format!("{} of {}: {content}", one_line(view_type), one_line(server));
                lines.push(Line { who: "view", what });
            }
        }
        lines
    }
}

/// Formats a progress: a bar, the percentage and the text.
fn progress(view: &View) -> String {
    let text = view.content["text"].as_str().map(one_line).unwrap_or_default();
    let Some(fraction) = view.content["fraction"].as_f64() else {
        return cut(&one_line(&view.content.to_string()), SHORT);
    };
    let fraction = fraction.clamp(0.0, 1.0);
    let full = (fraction * BAR as f64).round() as usize;
    let bar: String = (0..BAR).map(|at| if at < full { '█' } else { '░' }).collect();
    format!("{bar} {:3.0}% {text}", fraction * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn view(view_type: &str, content: Value) -> View {
        let view = json!({"view_type": view_type, "server": "http://s", "content": content,
            "at": "1970-01-01T00:00:00.000Z"});
        serde_json::from_value(view).unwrap()
    }

    #[test]
    fn progress_is_one_row_and_other_views_are_lines() {
        let mut views = ToolViews::default();
        views.push(&view("progress", json!({"fraction": 0.25, "text": "half\nway"})), false);
        views.push(&view("progress", json!({"fraction": 0.5, "text": "on"})), false);
        assert_eq!(views.progress().collect::<Vec<_>>(), ["█████░░░░░  50% on"]);
        views.calls_ended();
        assert_eq!(views.progress().count(), 0);
        views.push(&view("old", json!(1)), true);
        views.push(&view("map", json!({"x": 1})), false);
        let lines: Vec<String> = views.due().into_iter().map(|line| line.what).collect();
        assert_eq!(lines, ["map of http://s: {\"x\":1}"]);
        views.push(&view("map", json!({"x": 2})), false);
        assert!(views.due().is_empty(), "too soon after the last line");
    }
}
