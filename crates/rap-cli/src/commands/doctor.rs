//! `rap doctor`: finds and explains damage in a database, without a running runtime and without changing anything.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use rap_runtime::Database;
use rap_runtime::doctor::{Finding, Report, examine};
use serde_json::json;

use super::{print, print_json};
use crate::table::{BOLD, DIM, styled};

/// Arguments of `rap doctor`.
#[derive(Args)]
pub struct Doctor {
    /// SQLite file to examine [default: the database that the configuration names].
    pub file: Option<PathBuf>,
    /// Configuration file that names the database [default: rap.toml, if it exists].
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    pub config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command. Fails if the database is damaged.
pub async fn run(arguments: Doctor, database: &Database) -> anyhow::Result<()> {
    let report = examine(database).await?;
    if arguments.json {
        print_json(&json!({
            "healthy": report.is_healthy(),
            "threads": report.threads,
            "entries": report.entries,
            "calls": report.calls,
            "findings": report.findings,
            "not_shown": report.not_shown,
        }))?;
    } else {
        print(&text(&report))?;
    }
    match report.findings.len() as u64 + report.not_shown {
        0 => Ok(()),
        1 => Err(anyhow!("the database has 1 problem")),
        count => Err(anyhow!("the database has {count} problems")),
    }
}

fn text(report: &Report) -> String {
    let Report { threads, entries, calls, findings, not_shown } = report;
    let mut text = String::new();
    for Finding { thread, what, advice, .. } in findings {
        let place = thread.as_ref().map(|id| format!("thread {id}: ")).unwrap_or_default();
        let line = rap_protocol::visible::text(&format!("{place}{what}")).into_owned();
        text += &format!("{}\n  {}\n", styled(BOLD, &line), styled(DIM, advice));
    }
    if *not_shown > 0 {
        text += &format!("{not_shown} further problems are not shown\n");
    }
    text += &format!("read {threads} threads, {entries} entries and {calls} calls\n");
    text
}
