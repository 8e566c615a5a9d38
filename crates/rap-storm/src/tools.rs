//! The tool server of the storm: this program in another role, on `rap-tool`. Every start of a handler is a line in a file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use rap_testkit::programs;
use rap_tool::prelude::*;
use rap_tool::{Limits, schemars};

/// First argument of the process that is the tool server.
const ROLE: &str = "tool-server";
/// Variable with the path of the file that lists the starts of handlers.
const STARTS: &str = "STORM_STARTS";
/// Longest pause between attempts to deliver a callback. By default it is as long as the time in which everything has
/// to become quiet after the last fault.
const LONGEST_PAUSE: Duration = Duration::from_secs(20);

/// Works for a time and returns its mark.
#[derive(Deserialize, JsonSchema)]
struct Work {
    mark: String,
    ms: u64,
}

/// Sends a number of events.
#[derive(Deserialize, JsonSchema)]
struct Ticks {
    mark: String,
    count: u64,
    ms: u64,
}

pub(crate) fn is_requested() -> bool {
    std::env::args().nth(1).is_some_and(|role| role == ROLE)
}

/// Command of a tool server that listens on `port` and is reached at `url`.
pub(crate) fn command(data: &Path, starts: &Path, port: u16, url: &str) -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.arg(ROLE).env(STARTS, starts);
    programs::tool_server(program, data, &[("PORT", &port.to_string()), ("RAP_TOOL_URL", url)])
}

/// Notes that a handler has started. The file is not synced: a process that is killed leaves what it wrote.
fn note(mark: &str) {
    let path = std::env::var_os(STARTS).expect("the storm sets it");
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(format!("{mark}\n").as_bytes())).unwrap();
}

async fn work(args: Work, call: Call) -> Result<String> {
    note(&args.mark);
    tokio::select! {
        () = tokio::time::sleep(Duration::from_millis(args.ms)) => Ok(format!("done {};", args.mark)),
        () = call.cancelled() => Err(Error::new("stopped early")),
    }
}

async fn ticks(args: Ticks, subscribe: Subscribe) -> Result<()> {
    let sent: u64 = subscribe.cursor()?.unwrap_or(0);
    let subscription = subscribe.confirm(format!("done {};", args.mark)).await?;
    let text = |number: u64| format!("tick {} {number};", args.mark);
    for number in sent + 1..args.count {
        tokio::time::sleep(Duration::from_millis(args.ms)).await;
        subscription.send(Event::new(text(number)).cursor(number)).await?;
    }
    subscription.finish(text(args.count)).await
}

pub(crate) fn run() -> ExitCode {
    let mut limits = Limits::default();
    limits.delivery.longest_pause = LONGEST_PAUSE;
    let server = ToolServer::new("storm")
        .limits(limits)
        .tool("once", work)
        .offer(Tool::new("again", work).restartable())
        .subscription("ticks", ticks);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    match runtime.block_on(server.serve("127.0.0.1:0")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the tool server ended: {error}");
            ExitCode::FAILURE
        }
    }
}
