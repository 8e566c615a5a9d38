//! A tool that runs programs: each in the directory of its thread, and ended with its call.

use rap_tool::prelude::*;
use rap_tool::process::{self, Program};

/// Run a script with `sh`.
#[derive(Deserialize, JsonSchema)]
struct Run {
    /// The script.
    script: String,
}

async fn run(args: Run, call: Call) -> Result<String> {
    let directory = call.directory().await?;
    let program =
        Program::new("/bin/sh").args(["-c", &args.script]).directory(&directory).writable([&directory]);
    let mut tree = program.spawn().await?;
    let ended = tokio::select! {
        ended = tree.wait() => Some(ended?),
        () = call.cancelled() => None,
    };
    tree.stop().await;
    Ok(format!("{ended:?}"))
}

fn main() -> Result<()> {
    process::init();
    let server = ToolServer::new("commands").offer(Tool::new("run", run).destructive());
    tokio::runtime::Runtime::new()?.block_on(server.serve("127.0.0.1:7501"))
}
