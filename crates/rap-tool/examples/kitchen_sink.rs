//! One tool of each kind, for other programs to test against.
//!
//! It listens on `PORT` and keeps its journal in `RAP_TOOL_DATA`.

use std::time::Duration;

use rap_tool::prelude::*;

/// Says back what it is told.
#[derive(Deserialize, JsonSchema)]
struct Echo {
    /// What to say.
    text: String,
}

/// Fails with a message.
#[derive(Deserialize, JsonSchema)]
struct Fail {
    /// What the error says.
    message: String,
}

/// Panics.
#[derive(Deserialize, JsonSchema)]
struct Panic {}

/// Takes its time. It can be run again after a restart, and stops when it is cancelled.
#[derive(Deserialize, JsonSchema)]
struct Slow {
    /// How long.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    seconds: f64,
}

/// Subscribes to a clock that ticks so many times; the last tick is the final event.
#[derive(Deserialize, JsonSchema)]
struct Tick {
    /// How many times.
    #[schemars(range(min = 1))]
    count: u64,
    /// How many milliseconds lie between two ticks.
    every_ms: u64,
}

async fn echo(args: Echo, _: Call) -> Result<String> {
    Ok(format!("echo {}", args.text))
}

async fn fail(args: Fail, _: Call) -> Result<String> {
    Err(Error::new(args.message))
}

async fn panic(_: Panic, _: Call) -> Result<String> {
    panic!("a tool that panics, as it was asked to")
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

#[tokio::main]
async fn main() -> Result<()> {
    ToolServer::new("kitchen_sink")
        .description("One tool of each kind, to test against.")
        .tool("echo", echo)
        .tool("fail", fail)
        .tool("panic", panic)
        .offer(Tool::new("slow", slow).restartable())
        .subscription("tick", tick)
        .serve("127.0.0.1:7500")
        .await
}
