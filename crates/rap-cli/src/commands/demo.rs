//! `rap demo`: the story of an agent that sleeps, told while it happens.
//!
//! Nothing of it is staged: the runtime is a process of its own on a database of its own, the tools are servers, and
//! every line is told when the runtime or a tool says that it happened. All of it is gone at the end.

mod chapters;
mod kitchen;
mod runtime;
mod story;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::Args;
use rap_io::serve::Signals;
use tempfile::TempDir;

use self::kitchen::Kitchen;
use self::runtime::{Model, Runtime};
use self::story::{Story, THREAD, paragraph, tell};
use super::print;
use crate::table::{BOLD, DIM, styled};

/// How to tell it.
#[derive(Args)]
pub struct Demo {
    /// Keep it running at the end, to be looked at with the other commands; ^C ends it.
    #[arg(long)]
    pub stay: bool,
}

/// Tells the story. However it ends, all processes are ended and everything it wrote is removed.
pub async fn run(demo: Demo) -> anyhow::Result<()> {
    let directory =
        tempfile::Builder::new().prefix("rap-demo-").tempdir().context("no temporary directory")?;
    let mut signals = Signals::listen();
    let told = tokio::select! {
        told = play(directory.path()) => told,
        _ = signals.next() => Err(anyhow!("stopped before its end")),
    };
    let outcome = match told {
        Ok(story) if demo.stay => tokio::select! {
            outcome = stay(story) => outcome,
            _ = signals.next() => Ok(()),
        },
        Ok(mut story) => story.runtime.kill().await,
        Err(error) => Err(error),
    };
    remove(directory).await?;
    outcome
}

/// A process that was killed a moment ago may still have been writing.
async fn remove(directory: TempDir) -> anyhow::Result<()> {
    for _ in 0..50 {
        if std::fs::remove_dir_all(directory.path()).is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    match directory.close() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).context("the demo's temporary directory could not be removed")
        }
        _ => Ok(()),
    }
}

async fn play(directory: &Path) -> anyhow::Result<Story> {
    let intro = "A runtime keeps agents in a database and asks a model what they do next; here it is a scripted \
                 one. Tools are servers of their own: they are called, and call back when they are done. In \
                 between nothing runs for the agent, no loop and no polling, and all that it is stands on \
                 disk. See it sleep and wake:";
    let title = styled(BOLD, "An agent that sleeps while it waits");
    print(&format!("{title}\n{}\n\n", paragraph(intro, 0, DIM)))?;
    let began = Instant::now();
    let kitchen = Kitchen::open(directory).await?;
    let runtime = Runtime::start(directory, &kitchen).await?;
    let (url, process) = (&runtime.url, runtime.process());
    tell(began, "runtime", BOLD, &format!("listens on {url}, process {process}, with an empty database"))?;
    tell(began, "tools", BOLD, "two servers: an oven, which takes its time, and a doorbell")?;
    let mut story = Story::begin(began, runtime, kitchen).await?;
    chapters::tell_all(&mut story).await?;
    Ok(story)
}

/// From here on the model does what it is told.
async fn stay(mut story: Story) -> anyhow::Result<()> {
    story.runtime.kill().await?;
    story.runtime.configure(&Model::Obedient, &story.kitchen)?;
    story.runtime.start_again().await?;
    let url = &story.runtime.url;
    print(&format!(
        "\nIt stays at {url} until ^C. In another terminal:\n  export RAP_URL={url}\n  rap threads show {THREAD}\n  \
         rap chat    then say: call bake {{\"what\": \"bread\", \"seconds\": 20}}\n"
    ))?;
    std::future::pending().await
}
