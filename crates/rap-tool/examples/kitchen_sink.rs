//! One tool of each kind, for other programs to test against.
//!
//! It listens on `PORT` and keeps its journal in `RAP_TOOL_DATA`.

use std::time::Duration;

use rap_tool::prelude::*;
use serde_json::json;

/// Returns its text with the prefix "echo".
#[derive(Deserialize, JsonSchema)]
struct Echo {
    /// The text to return.
    text: String,
}

/// Fails with a message.
#[derive(Deserialize, JsonSchema)]
struct Fail {
    /// The error message.
    message: String,
}

/// Panics.
#[derive(Deserialize, JsonSchema)]
struct Panic {}

/// Sleeps. It runs again after a restart, and stops when it is cancelled.
#[derive(Deserialize, JsonSchema)]
struct Slow {
    /// How long to sleep.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    seconds: f64,
}

/// Subscribes to a clock that ticks a given number of times. The last tick is the final event.
#[derive(Deserialize, JsonSchema)]
struct Tick {
    /// Number of ticks.
    #[schemars(range(min = 1))]
    count: u64,
    /// Milliseconds between two ticks.
    every_ms: u64,
}

/// Lets the user choose a colour.
#[derive(Deserialize, JsonSchema)]
struct Choose {}

/// Sends the user to this server's own consent page.
#[derive(Deserialize, JsonSchema)]
struct Authorize {}

/// Shows the diff of a file to the user.
#[derive(Deserialize, JsonSchema)]
struct Show {}

async fn echo(args: Echo, _: Call) -> Result<String> {
    Ok(format!("echo {}", args.text))
}

async fn fail(args: Fail, _: Call) -> Result<String> {
    Err(Error::new(args.message))
}

async fn panic(_: Panic, _: Call) -> Result<String> {
    panic!("this tool always panics")
}

async fn slow(args: Slow, call: Call) -> Result<String> {
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(args.seconds)) => Ok(format!("slept {}", args.seconds)),
        () = call.cancelled() => Err(Error::new("stopped early")),
    }
}

async fn tick(args: Tick, subscribe: Subscribe) -> Result<()> {
    let ticked: u64 = subscribe.cursor()?.unwrap_or(0);
    let subscription = subscribe.confirm(format!("Ticking {} times.", args.count)).await?;
    let pause = Duration::from_millis(args.every_ms);
    for number in ticked + 1..args.count {
        tokio::time::sleep(pause).await;
        subscription.send(Event::new(format!("tick {number}")).cursor(number)).await?;
    }
    tokio::time::sleep(pause).await;
    subscription.finish(format!("tick {}", args.count)).await
}

async fn choose(_: Choose, call: Call) -> Result<String> {
    let colours = ["red", "green", "blue"];
    let chosen = call.choose("Which colour?", colours, 1).await?;
    Ok(format!("chose {}", colours[chosen]))
}

async fn authorize(_: Authorize, call: Call) -> Result<&'static str> {
    call.authorize(call.redirect_url()).await?;
    Ok("authorized")
}

async fn show(_: Show, call: Call) -> Result<&'static str> {
    call.view("diff", json!({"path": "greeting.txt", "patch": "-Hello\n+Hello, world\n"})).await?;
    Ok("shown")
}

#[tokio::main]
async fn main() -> Result<()> {
    ToolServer::new("kitchen_sink")
        .description("One tool of each kind, to test against.")
        .tool("echo", echo)
        .tool("fail", fail)
        .tool("panic", panic)
        .offer(
            Tool::new("slow", slow)
                .restartable()
                .long_running()
                .expected_duration(Duration::ZERO..=Duration::from_secs(3600)),
        )
        .subscription("tick", tick)
        .offer(Tool::new("choose", choose).restartable())
        .offer(Tool::new("authorize", authorize).restartable().requires_auth("the user's consent"))
        .offer(Tool::new("show", show).read_only())
        .serve("127.0.0.1:7500")
        .await
}
