//! `rap demo`: runs an agent through a fixed scenario and prints what happens.
//!
//! The demo uses a real runtime in a separate process with its own database, and real tool servers. Every line is printed
//! when the runtime or a tool reports the event. Processes and files are removed at the end.

mod driver;
mod runtime;
mod sections;
mod tools;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::Args;
use rap_io::serve::Signals;
use tempfile::TempDir;

use self::driver::{Driver, THREAD, paragraph, print_line};
use self::runtime::{Model, Runtime};
use self::tools::DemoTools;
use super::print;
use crate::table::{BOLD, DIM, styled};

/// Arguments of `rap demo`.
#[derive(Args)]
pub struct Demo {
    /// Keep the runtime running at the end, for use with the other commands, until ^C.
    #[arg(long)]
    pub stay: bool,
}

/// Runs the demo. All its processes are ended and its files are removed, even if it fails.
pub async fn run(demo: Demo) -> anyhow::Result<()> {
    let directory = tempfile::Builder::new()
        .prefix("rap-demo-")
        .tempdir()
        .context("cannot create a temporary directory")?;
    let mut signals = Signals::listen();
    let outcome = tokio::select! {
        outcome = run_sections(directory.path()) => outcome,
        _ = signals.next() => Err(anyhow!("the demo was interrupted")),
    };
    let outcome = match outcome {
        Ok(driver) if demo.stay => tokio::select! {
            outcome = keep_running(driver) => outcome,
            _ = signals.next() => Ok(()),
        },
        Ok(mut driver) => driver.runtime.kill().await,
        Err(error) => Err(error),
    };
    remove(directory).await?;
    outcome
}

/// Removes the directory. Several attempts may be needed while a killed process still writes to it.
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

async fn run_sections(directory: &Path) -> anyhow::Result<Driver> {
    let intro = "A runtime keeps agents in a database and asks a model what to do next; in this demo, a scripted \
                 model. Tools are separate servers: the runtime calls them, and they call back when they are \
                 done. In between nothing runs for the agent, no loop and no polling; its whole state is on \
                 disk. Watch it wait and continue:";
    let title = styled(BOLD, "An agent that sleeps while it waits");
    print(&format!("{title}\n{}\n\n", paragraph(intro, 0, DIM)))?;
    let began = Instant::now();
    let tools = DemoTools::start(directory).await?;
    let runtime = Runtime::start(directory, &tools).await?;
    let (url, process) = (&runtime.url, runtime.process());
    print_line(
        began,
        "runtime",
        BOLD,
        &format!("listening on {url}, process {process}, with an empty database"),
    )?;
    print_line(began, "web", BOLD, &format!("{url}/ shows it in a browser; --stay keeps it after the demo"))?;
    print_line(began, "tools", BOLD, "two servers: an oven, which is slow, and a doorbell")?;
    let mut driver = Driver::start(began, runtime, tools).await?;
    sections::run_all(&mut driver).await?;
    Ok(driver)
}

/// Restarts the runtime with a model that follows instructions, and keeps it running.
async fn keep_running(mut driver: Driver) -> anyhow::Result<()> {
    driver.runtime.kill().await?;
    driver.runtime.configure(&Model::Interactive, &driver.tools)?;
    driver.runtime.restart().await?;
    let url = &driver.runtime.url;
    print(&format!(
        "\nThe runtime stays at {url} until ^C. Open {url}/ in a browser. In another terminal:\n  export RAP_URL={url}\n  rap threads show {THREAD}\n  \
         rap chat    then type: call bake {{\"what\": \"bread\", \"seconds\": 20}}\n"
    ))?;
    std::future::pending().await
}
