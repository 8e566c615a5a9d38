//! The sections of the demo. Each sends messages to the agent and waits for what follows.

use std::time::Duration;

use anstyle::Style;
use anyhow::ensure;
use rap_api::{Item, Status, Threads};

use super::driver::{Driver, THREAD, paragraph};
use super::runtime::{Model, ResourceUse};
use crate::commands::print;
use crate::status_text;
use crate::table::{BOLD, CYAN, YELLOW, styled};

pub(super) async fn run_all(driver: &mut Driver) -> anyhow::Result<()> {
    a_slow_call(driver).await?;
    an_event(driver).await?;
    a_message_during_a_call(driver).await?;
    a_cancellation(driver).await?;
    a_kill(driver).await?;
    a_child_and_a_sleep(driver).await?;
    the_end(driver).await
}

/// More entries than the history of the demo has.
const ENTRIES: usize = 1000;
/// Time for the user to read.
const PAUSE: Duration = Duration::from_secs(1);

async fn section(driver: &mut Driver, title: &str) -> anyhow::Result<()> {
    driver.run_for(PAUSE).await?;
    Ok(print(&format!("\n{}\n", styled(BOLD, title)))?)
}

async fn a_slow_call(driver: &mut Driver) -> anyhow::Result<()> {
    section(driver, "1. A slow call").await?;
    driver.say("Please bake a loaf of bread.").await?;
    driver
        .run_until("the bread is in the oven", |state| state.oven_reported("bread: baking for 6 s"))
        .await?;
    driver.run_until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    driver.run_for(Duration::from_millis(500)).await?;
    let before = driver.runtime.resource_use();
    let entries = driver.client.history(THREAD, 0, ENTRIES).await?.entries.len();
    let thread = driver.client.thread(THREAD).await?;
    driver.explain(&format!(
        "The agent is now only rows in a database: a thread that is {}, {entries} entries of history, {} open call.",
        status_text::label(thread.status),
        thread.waiting_on.len()
    ))?;
    driver.run_for(Duration::from_secs(4)).await?;
    let after = driver.runtime.resource_use();
    driver.explain(&describe_use(before, after))?;
    driver.run_until("the bread is ready", |state| state.is_idle() && state.answers == 2).await?;
    let woken = driver.runtime.resource_use();
    let written = woken.database.saturating_sub(after.database);
    driver.explain(&format!("Waking it, answering and sleeping again wrote {}.", bytes(written)))
}

fn describe_use(before: ResourceUse, after: ResourceUse) -> String {
    let written = bytes(after.database.saturating_sub(before.database));
    let processor = before.processor.zip(after.processor).map(|(before, after)| after.saturating_sub(before));
    match processor {
        Some(used) => format!(
            "In the last 4 s the runtime used {:.1} ms of CPU time and wrote {written} to its database.",
            used.as_secs_f64() * 1000.0
        ),
        None => format!("In the last 4 s the runtime wrote {written} to its database."),
    }
}

fn bytes(count: u64) -> String {
    if count < 10_000 { format!("{count} bytes") } else { format!("{} kB", count / 1000) }
}

async fn an_event(driver: &mut Driver) -> anyhow::Result<()> {
    section(driver, "2. An event").await?;
    driver.say("Tell me when the doorbell rings.").await?;
    driver.run_until("it listens", |state| state.is_idle() && state.answers == 4).await?;
    driver.run_for(Duration::from_secs(2)).await?;
    driver.print_line("bell", YELLOW, "ding dong")?;
    driver.tools.ring();
    driver.run_until("the agent answers the event", |state| state.is_idle() && state.answers == 5).await
}

async fn a_message_during_a_call(driver: &mut Driver) -> anyhow::Result<()> {
    section(driver, "3. A message during a call").await?;
    driver.say("Bake a cake, please.").await?;
    driver
        .run_until("the cake is in the oven", |state| state.oven_reported("a cake: baking for 5 s"))
        .await?;
    driver.run_until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    driver.run_for(Duration::from_secs(2)).await?;
    driver.say("By the way, what is six times seven?").await?;
    driver.run_until("it answers", |state| state.status == Some(Status::Idle) && state.answers == 7).await?;
    driver.explain(
        "It answered at once. The call continues in the background, and its result follows later.",
    )?;
    driver.run_until("the cake is ready", |state| state.is_idle() && state.answers == 8).await
}

async fn a_cancellation(driver: &mut Driver) -> anyhow::Result<()> {
    section(driver, "4. A cancellation").await?;
    driver.say("And a pizza.").await?;
    driver
        .run_until("the pizza is in the oven", |state| state.oven_reported("a pizza: baking for 600 s"))
        .await?;
    driver.run_until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    driver.run_for(Duration::from_millis(1500)).await?;
    let call = driver.last_call();
    driver.print_line("you", CYAN, &format!("(cancel the call: rap calls cancel {THREAD} {call})"))?;
    driver.client.cancel(THREAD, &call).await?;
    let cancelled = "a pizza: cancelled, taken out again";
    driver
        .run_until("the oven knows", |state| {
            state.oven_reported(cancelled) && state.is_idle() && state.answers == 10
        })
        .await
}

async fn a_kill(driver: &mut Driver) -> anyhow::Result<()> {
    section(driver, "5. kill -9").await?;
    driver.say("Then croissants.").await?;
    driver
        .run_until("they are in the oven", |state| state.oven_reported("croissants: baking for 4 s"))
        .await?;
    driver.run_until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    driver.run_for(Duration::from_secs(1)).await?;
    let process = driver.runtime.process();
    driver.runtime.kill().await?;
    driver.print_line(
        "runtime",
        BOLD,
        &format!("process {process} was killed with kill -9 during the call"),
    )?;
    driver.run_until("the croissants are done", |state| state.oven_reported("croissants: done")).await?;
    driver.explain("The oven tries to deliver its result. Nothing listens there, so it retries.")?;
    driver.run_for(Duration::from_millis(1500)).await?;
    driver.runtime.configure(&Model::AfterKill, &driver.tools)?;
    driver.runtime.restart().await?;
    driver.reconnect();
    let process = driver.runtime.process();
    driver.print_line("runtime", BOLD, &format!("restarted on the same database, process {process}"))?;
    driver.run_until("the result arrives", |state| state.is_idle() && state.answers == 12).await
}

async fn a_child_and_a_sleep(driver: &mut Driver) -> anyhow::Result<()> {
    section(driver, "6. A child and a sleep").await?;
    driver.say("A tart and tea, please.").await?;
    driver
        .run_until("the tart is in the oven", |state| state.oven_reported("a tart: baking for 2 s"))
        .await?;
    let children = driver.client.list::<Threads>(&[("parent", THREAD)], Some(100)).await?.threads;
    ensure!(children.len() == 1, "the agent has {} children, not one", children.len());
    driver.explain(&format!(
        "A child is a separate thread, {}. It sees the conversation up to this point and works while its parent sleeps.",
        children[0].id
    ))?;
    driver.run_until("it reports", |state| state.answers == 14).await?;
    driver.run_until("the tea is ready", |state| state.is_idle() && state.answers == 15).await
}

async fn the_end(driver: &Driver) -> anyhow::Result<()> {
    let entries = driver.client.history(THREAD, 0, ENTRIES).await?.entries;
    let count = |what: &str| {
        let matches =
            |item: &Item| matches!(item, Item::Result { content, .. } if content.to_text().starts_with(what));
        entries.iter().filter(|entry| matches(&entry.item)).count()
    };
    for what in ["bread: golden", "a cake: golden", "croissants: golden", "It rang", "The tart is done"] {
        ensure!(count(what) == 1, "the history has {} results `{what}`, not one", count(what));
    }
    driver.explain(
        "Nothing was lost or duplicated: every result, the event and the report are in the history exactly once.",
    )?;
    let lines = [
        (
            "Shown: ",
            format!(
                "a slow call, an event, a message during a call, a cancellation, a kill -9, a child and a sleep; {} entries.",
                entries.len()
            ),
        ),
        (
            "Next:  ",
            "write a rap.toml with rap init; add a model and tool servers to it; then rap serve and rap chat.".into(),
        ),
        ("Or:    ", "keep this runtime with rap demo --stay, and try rap threads ls, rap tools ls, rap chat.".into()),
    ];
    print("\n")?;
    for (head, text) in lines {
        print(&format!("{}{}\n", styled(BOLD, head), paragraph(&text, head.len(), Style::new())))?;
    }
    Ok(())
}
