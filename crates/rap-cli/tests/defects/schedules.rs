//! Schedules whose text finds no room in a busy thread.

use std::time::Duration;

use serde_json::{Value, json};

use super::support::{Rap, Setup, Tools, until};

/// The schedule of a thread among the timers.
async fn next_time(rap: &Rap, thread: &str) -> String {
    let timers = rap.listing("timers").await;
    let of = |timer: &&Value| timer["thread_id"] == *thread && timer["kind"] == "schedule";
    timers.iter().find(of).unwrap()["at"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_schedule_without_room_for_its_text_keeps_its_rhythm() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("held_per_thread = 1").start();
    let thread = rap.open("call schedule {\"cron\": \"* * * * * *\", \"text\": \"tea\"}\ncall work {}").await;
    let work = tools.invocation().await;
    rap.until(&thread, "full", |thread| thread["held"] == 1).await;
    let mut times = vec![next_time(&rap, &thread).await];
    // The first of these was set by the text that is held, all others by texts that found no room.
    while times.len() < 4 {
        let moved = async || Some(next_time(&rap, &thread).await).filter(|next| next > times.last().unwrap());
        let next = until("the next time of the schedule", moved).await;
        times.push(next);
    }
    assert_eq!(rap.thread(&thread).await["held"], 1);
    work.returns("done").await;
    let texts = async || {
        let story = rap.story(&thread).await;
        story.iter().filter(|line| line.starts_with("result ") && line.ends_with(": tea")).count()
    };
    // The one that was held, and then others.
    until("texts of the schedule", async || (texts().await >= 3).then_some(())).await;
}

/// A number of schedules that fills more than any page of timers.
const THREADS: usize = 72;
const SCHEDULES: usize = 31;

#[tokio::test]
async fn schedules_without_room_for_their_text_stop_no_other_timer_and_do_not_spin() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("held_per_thread = 1").start();
    let arguments = json!({"cron": "*/10 * * * * *", "text": "tea"});
    let message = format!("{}call work {{}}", format!("call schedule {arguments}\n").repeat(SCHEDULES));
    let mut threads = Vec::new();
    for _ in 0..THREADS {
        threads.push(rap.open(&message).await);
    }
    for thread in &threads {
        until("a held text", async || (rap.thread(thread).await["held"] == 1).then_some(())).await;
    }
    let sleeper = rap.open("call sleep {\"seconds\": 0.2}").await;
    rap.until_line(&sleeper, "assistant: sleep: the time is over").await;
    // Whatever it has to do every ten seconds, it is done with it at some time.
    let quiet = async || {
        let before = rap.cpu_time();
        tokio::time::sleep(Duration::from_secs(1)).await;
        (rap.cpu_time() - before < Duration::from_millis(50)).then_some(())
    };
    until("a second with next to no CPU time", quiet).await;
}
