//! Compares a durable tool server with a bare router on the same machine: `cargo bench -p rap-tool`.
//!
//! Absolute figures vary between machines and between runs; compare the ratios within one run. This process generates
//! the load, and each server runs in a separate process.

use std::time::Duration;

use rap_testkit::bench::{self, BenchResult, Figure, Scale};
use rap_tool::measure::{Sizes, deliveries, delivery_delays, in_turns, start, subscriptions};

/// Maximum median time from the end of a handler to the callback with its result.
const DELIVERY_DELAY: Duration = Duration::from_millis(2);
/// Maximum memory of the idle subscriptions.
const SUBSCRIPTION_BYTES: u64 = 200_000_000;

/// The allocator of the `rap` binary, for the router as well.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const FULL: Sizes = Sizes {
    sync: Duration::from_secs(2),
    rounds: 10,
    round: Duration::from_millis(500),
    subscriptions: 100_000,
    deliveries: 50_000,
    delays: 1_000,
};

const SMALL: Sizes = Sizes {
    sync: Duration::from_millis(100),
    rounds: 2,
    round: Duration::from_millis(50),
    subscriptions: 200,
    deliveries: 200,
    delays: 20,
};

#[tokio::main]
async fn main() -> BenchResult<()> {
    if rap_tool::measure::serve_role().await? {
        return Ok(());
    }
    bench::run(measure).await
}

async fn measure(scale: Scale) -> BenchResult<()> {
    let sizes = scale.of(&FULL, &SMALL);
    let data = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let data = data.path();
    let sync = bench::fdatasync(data, sizes.sync)?;
    eprintln!("the bare router and durable invocations, in turns …");
    let router = start("router", data)?;
    let tool = start("tool", &data.join("hold"))?;
    let (router_1, hold_1) = in_turns(&router, &tool, 1, sizes).await?;
    let (router_64, hold_64) = in_turns(&router, &tool, 64, sizes).await?;
    drop((router, tool));
    eprintln!("{} results …", sizes.deliveries);
    let delivered = deliveries(&data.join("echo"), sizes.deliveries).await?;
    let delays = delivery_delays(&data.join("time"), sizes.delays).await?;
    eprintln!("{} subscriptions …", sizes.subscriptions);
    let subscribed = subscriptions(&data.join("wait"), sizes.subscriptions).await?;

    Figure::print_heading();
    sync.print("fdatasync of this disk");
    router_1.print("router with an empty handler, 1 connection");
    router_64.print("router with an empty handler, 64 connections");
    hold_1.print("durable invocations, 1 connection");
    hold_64.print("durable invocations, 64 connections");
    delays.print("from the end of a handler to its callback");
    println!("{:<52} {delivered:>10.0}", "results delivered (accepted, run, acknowledged)");
    println!();
    let share = 100.0 * hold_64.per_second / router_64.per_second;
    let slower = hold_64.p99.as_secs_f64() / router_64.p99.as_secs_f64();
    println!(
        "at 64 connections: {share:.0} % of the bare router (at least 25), p99 {slower:.1} times (at most 5)"
    );
    let delay = delays.p50;
    println!("a result arrives {delay:.1?} after the end of its handler (at most {DELIVERY_DELAY:?})");
    let [taken, most] = [subscribed, SUBSCRIPTION_BYTES].map(|bytes| bytes / 1_000_000);
    println!("{} idle subscriptions: {taken} MB (at most {most})", sizes.subscriptions);
    scale.check(&[share >= 25.0, slower <= 5.0, delay <= DELIVERY_DELAY, subscribed <= SUBSCRIPTION_BYTES])
}
