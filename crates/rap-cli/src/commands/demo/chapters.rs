//! The chapters of the story.

use std::time::Duration;

use anstyle::Style;
use anyhow::ensure;

use super::runtime::{Model, Used};
use super::story::{Story, THREAD, paragraph};
use crate::api::{Item, Status, text_of};
use crate::commands::print;
use crate::table::{BOLD, CYAN, YELLOW, styled};

pub(super) async fn tell_all(story: &mut Story) -> anyhow::Result<()> {
    a_slow_call(story).await?;
    an_event(story).await?;
    a_word_in_between(story).await?;
    a_cancellation(story).await?;
    a_kill(story).await?;
    a_child_and_a_sleep(story).await?;
    the_end(story).await
}

/// More entries than the story has.
const ENTRIES: usize = 1000;
/// Time to read.
const PAUSE: Duration = Duration::from_secs(1);

async fn chapter(story: &mut Story, title: &str) -> anyhow::Result<()> {
    story.pass(PAUSE).await?;
    Ok(print(&format!("\n{}\n", styled(BOLD, title)))?)
}

async fn a_slow_call(story: &mut Story) -> anyhow::Result<()> {
    chapter(story, "1. A slow call").await?;
    story.say("Please bake a loaf of bread.").await?;
    story.until("the bread is in the oven", |state| state.has_told("bread: baking for 6 s")).await?;
    story.until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    story.pass(Duration::from_millis(500)).await?;
    let before = story.runtime.used();
    let entries = story.client.history(THREAD, 0, ENTRIES).await?.len();
    let thread = story.client.thread(THREAD).await?;
    story.explain(&format!(
        "The agent is now rows in a database: a thread that is {}, {entries} entries of history, {} open call.",
        thread.status.word(),
        thread.waiting_on.len()
    ))?;
    story.pass(Duration::from_secs(4)).await?;
    let after = story.runtime.used();
    story.explain(&sleeping(before, after))?;
    story.until("the bread is ready", |state| state.is_at_rest() && state.answers == 2).await?;
    let woken = story.runtime.used();
    let written = woken.database.saturating_sub(after.database);
    story.explain(&format!(
        "To wake it, let it answer and put it to sleep again, {} were written.",
        bytes(written)
    ))
}

fn sleeping(before: Used, after: Used) -> String {
    let written = bytes(after.database.saturating_sub(before.database));
    let processor = before.processor.zip(after.processor).map(|(before, after)| after.saturating_sub(before));
    match processor {
        Some(used) => format!(
            "In the last 4 s the runtime used {:.1} ms of processor time and wrote {written} to its database.",
            used.as_secs_f64() * 1000.0
        ),
        None => format!("In the last 4 s the runtime wrote {written} to its database."),
    }
}

fn bytes(count: u64) -> String {
    if count < 10_000 { format!("{count} bytes") } else { format!("{} kB", count / 1000) }
}

async fn an_event(story: &mut Story) -> anyhow::Result<()> {
    chapter(story, "2. An event").await?;
    story.say("Tell me when it rings at the door.").await?;
    story.until("it listens", |state| state.is_at_rest() && state.answers == 4).await?;
    story.pass(Duration::from_secs(2)).await?;
    story.tell("bell", YELLOW, "ding dong")?;
    story.kitchen.ring();
    story.until("it was told", |state| state.is_at_rest() && state.answers == 5).await
}

async fn a_word_in_between(story: &mut Story) -> anyhow::Result<()> {
    chapter(story, "3. A word in between").await?;
    story.say("Bake a cake, please.").await?;
    story.until("the cake is in the oven", |state| state.has_told("a cake: baking for 5 s")).await?;
    story.until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    story.pass(Duration::from_secs(2)).await?;
    story.say("By the way, what is six times seven?").await?;
    story.until("it answers", |state| state.status == Some(Status::Idle) && state.answers == 7).await?;
    story.explain("It answered at once. The call was not disturbed; its result comes when it comes.")?;
    story.until("the cake is ready", |state| state.is_at_rest() && state.answers == 8).await
}

async fn a_cancellation(story: &mut Story) -> anyhow::Result<()> {
    chapter(story, "4. A cancellation").await?;
    story.say("And a pizza.").await?;
    story.until("the pizza is in the oven", |state| state.has_told("a pizza: baking for 600 s")).await?;
    story.until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    story.pass(Duration::from_millis(1500)).await?;
    let call = story.last_call();
    story.tell("you", CYAN, &format!("(cancel the call: rap calls cancel {THREAD} {call})"))?;
    story.client.cancel(THREAD, &call).await?;
    let cancelled = "a pizza: cancelled, taken out again";
    story
        .until("the oven knows", |state| {
            state.has_told(cancelled) && state.is_at_rest() && state.answers == 10
        })
        .await
}

async fn a_kill(story: &mut Story) -> anyhow::Result<()> {
    chapter(story, "5. kill -9").await?;
    story.say("Then croissants.").await?;
    story.until("they are in the oven", |state| state.has_told("croissants: baking for 4 s")).await?;
    story.until("the agent sleeps", |state| state.status == Some(Status::Waiting)).await?;
    story.pass(Duration::from_secs(1)).await?;
    let process = story.runtime.process();
    story.runtime.kill().await?;
    story.tell(
        "runtime",
        BOLD,
        &format!("process {process} was killed with kill -9, in the middle of the call"),
    )?;
    story.until("the croissants are done", |state| state.has_told("croissants: done")).await?;
    story
        .explain("The oven wants to hand over its result. Nobody is there, so it tries again, and again.")?;
    story.pass(Duration::from_millis(1500)).await?;
    story.runtime.configure(&Model::Evening, &story.kitchen)?;
    story.runtime.start_again().await?;
    story.connect_again();
    let process = story.runtime.process();
    story.tell("runtime", BOLD, &format!("is started again on the same database, process {process}"))?;
    story.until("the result arrives", |state| state.is_at_rest() && state.answers == 12).await
}

async fn a_child_and_a_sleep(story: &mut Story) -> anyhow::Result<()> {
    chapter(story, "6. A child, and a sleep").await?;
    story.say("A tart and tea, please.").await?;
    story.until("the tart is in the oven", |state| state.has_told("a tart: baking for 2 s")).await?;
    let children = story.client.threads(&[("parent", THREAD)]).await?.threads;
    ensure!(children.len() == 1, "the agent has {} children, not one", children.len());
    story.explain(&format!(
        "A child is a thread of its own, {}: it saw the conversation up to here and works while its parent sleeps.",
        children[0].id
    ))?;
    story.until("it reports", |state| state.answers == 14).await?;
    story.until("the tea is ready", |state| state.is_at_rest() && state.answers == 15).await
}

async fn the_end(story: &Story) -> anyhow::Result<()> {
    let entries = story.client.history(THREAD, 0, ENTRIES).await?;
    let count = |what: &str| {
        let of_it =
            |item: &Item| matches!(item, Item::Result { content, .. } if text_of(content).starts_with(what));
        entries.iter().filter(|entry| of_it(&entry.item)).count()
    };
    for what in ["bread: golden", "a cake: golden", "croissants: golden", "It rang", "The tart is done"] {
        ensure!(count(what) == 1, "the history has {} results `{what}`, not one", count(what));
    }
    story.explain(
        "Nothing was lost and nothing came twice: every result, the event and the report stand once in the history.",
    )?;
    let lines = [
        (
            "Shown: ",
            format!(
                "a slow call, an event, a word in between, a cancellation, a kill -9, a child and a sleep; {} entries.",
                entries.len()
            ),
        ),
        (
            "Next:  ",
            "rap init writes a rap.toml; name a model and tool servers there; rap serve; rap chat.".into(),
        ),
        ("Or:    ", "rap demo --stay keeps this running, for rap threads ls, rap tools ls, rap chat.".into()),
    ];
    print("\n")?;
    for (head, text) in lines {
        print(&format!("{}{}\n", styled(BOLD, head), paragraph(&text, head.len(), Style::new())))?;
    }
    Ok(())
}
