//! A report for people: what failed and how, what could not be seen and why, and each requirement.

use std::fmt::Write;

use anstyle::{AnsiColor, Effects, Style};

use super::{Count, Exchange, Outcome, Report, Shown, Standing, Strictness, Verdict};
use crate::requirements::Requirement;

const BOLD: Style = Style::new().effects(Effects::BOLD);
const DIM: Style = Style::new().effects(Effects::DIMMED);
const RED: Style = AnsiColor::Red.on_default();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const GREEN: Style = AnsiColor::Green.on_default();

/// The width of what stands before a requirement's text.
const BEFORE_TEXT: usize = 36;

impl Report {
    /// The report as text with the escape codes of a terminal; whoever prints it elsewhere takes them away.
    /// Lines of the table are cut to the width; without one, nothing is.
    pub fn to_table(&self, strictness: Strictness, width: Option<usize>) -> String {
        let mut text = String::new();
        let out = &mut text;
        line(out, &format!("rap check {} {}\n", self.subject.word(), plain(&self.target)));
        line(out, &format!("{BOLD}{:<6}  {:<10}  {:<14}  REQUIREMENT{BOLD:#}", "ID", "LEVEL", "RESULT"));
        for (requirement, standing) in self.standings() {
            let (style, result) = shown(requirement, &standing, strictness);
            let Requirement { id, level, text, .. } = requirement;
            let text = cut(text, width.map(|width| width.saturating_sub(BEFORE_TEXT)));
            line(out, &format!("{id:<6}  {level:<10}  {style}{result:<14}{style:#}  {text}"));
        }
        self.failures(out, strictness);
        self.hidden(out);
        line(out, "");
        line(out, &self.summary(strictness));
        text
    }

    /// One line on how many requirements stand how.
    pub fn summary(&self, strictness: Strictness) -> String {
        let Count { passed, failed_must, failed_should, not_observable } = self.count();
        let (style, word) = if self.is_good(strictness) { (GREEN, "good") } else { (RED, "not good") };
        format!(
            "{style}{word}{style:#}: {passed} requirements pass, {failed_must} MUST and {failed_should} SHOULD \
             fail, {not_observable} can not be observed; {} probes in {:.1} s",
            self.outcomes.len(),
            self.took.as_secs_f64()
        )
    }

    fn failures(&self, out: &mut String, strictness: Strictness) {
        for Outcome { probe, verdict, .. } in &self.outcomes {
            let Verdict::Fail { what, exchanges } = verdict else { continue };
            let must = probe.requirements.iter().filter_map(|id| crate::requirements::find(id));
            let reading = probe.requirements.is_empty();
            let strict = strictness == Strictness::Strict && !reading;
            let wrong = strict || must.clone().any(|found| found.level.is_must());
            let (style, word) = if wrong { (RED, "fail") } else { (YELLOW, "warning") };
            line(out, "");
            line(out, &format!("{style}{word}{style:#} {BOLD}{}{BOLD:#}: {}", probe.name, probe.checks));
            for requirement in must {
                line(out, &format!("  {} {}: {}", requirement.id, requirement.level, requirement.text));
            }
            if reading {
                line(out, "  no requirement: this project's reading of what the specification leaves open");
            }
            line(out, &format!("  {style}{}{style:#}", plain(what)));
            for Exchange { request, answer } in exchanges {
                side(out, ">", request);
                side(out, "<", answer);
            }
        }
    }

    fn hidden(&self, out: &mut String) {
        let hidden = self.standings().filter_map(|(requirement, standing)| match standing {
            Standing::NotObservable { why } => Some((requirement, why)),
            _ => None,
        });
        let hidden: Vec<_> = hidden.collect();
        if !hidden.is_empty() {
            line(out, &format!("\n{BOLD}Not observable{BOLD:#}: neither passed nor failed"));
        }
        for (requirement, why) in hidden {
            line(
                out,
                &format!("  {:<6}  {:<10}  {DIM}{}{DIM:#}", requirement.id, requirement.level, plain(why)),
            );
        }
    }
}

fn shown(
    requirement: &Requirement,
    standing: &Standing<'_>,
    strictness: Strictness,
) -> (Style, &'static str) {
    match standing {
        Standing::Pass => (GREEN, "pass"),
        Standing::Fail if requirement.level.is_must() || strictness == Strictness::Strict => (RED, "fail"),
        Standing::Fail => (YELLOW, "warning"),
        Standing::NotObservable { .. } => (DIM, "not observable"),
    }
}

fn side(out: &mut String, mark: &str, shown: &Shown) {
    let body = if shown.body.is_empty() { String::new() } else { format!(" {}", plain(&shown.body)) };
    line(out, &format!("    {mark} {}{body}", plain(&shown.head)));
}

/// On one line, without anything that moves a cursor.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn cut(text: &str, width: Option<usize>) -> String {
    match width {
        Some(width) if text.chars().count() > width => {
            text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
        }
        _ => text.to_owned(),
    }
}

fn line(out: &mut String, text: &str) {
    writeln!(out, "{text}").expect("bug: writing to a string does not fail");
}
