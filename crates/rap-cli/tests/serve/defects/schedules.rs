//! Schedules of a thread whose held input is full.

use std::time::Duration;

use serde_json::{Value, json};

use rap_testkit::{Rap, Setup, Tools, until};

/// Due time of the thread's schedule.
async fn next_time(rap: &Rap, thread: &str) -> String {
    let timers = rap.listing("timers").await;
    let of = |timer: &&Value| timer["thread_id"] == *thread && timer["kind"] == "schedule";
    timers.iter().find(of).unwrap()["at"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_schedule_keeps_its_times_while_its_thread_is_full() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("held_per_thread = 1").start();
    let thread = rap.open("call schedule {\"cron\": \"* * * * * *\", \"text\": \"tea\"}\ncall work {}").await;
    let work = tools.invocation().await;
    rap.until(&thread, "full", |thread| thread["held"] == 1).await;
    let mut times = vec![next_time(&rap, &thread).await];
    // The first of these was set by the held text, all others by texts that were refused.
    while times.len() < 4 {
        let moved = async || Some(next_time(&rap, &thread).await).filter(|next| next > times.last().unwrap());
        let next = until("the next time of the schedule", moved).await;
        times.push(next);
    }
    assert_eq!(rap.thread(&thread).await["held"], 1);
    work.returns("done").await;
    let texts = async || {
        let transcript = rap.transcript(&thread).await;
        transcript.iter().filter(|line| line.starts_with("result ") && line.ends_with(": tea")).count()
    };
    // The held text, then others.
    until("texts of the schedule", async || (texts().await >= 3).then_some(())).await;
}

/// Together more schedules than a page of timers.
const THREADS: usize = 72;
const SCHEDULES: usize = 31;

#[tokio::test]
async fn schedules_of_full_threads_block_no_other_timer_and_use_little_cpu() {
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
    rap.until_line(&sleeper, "assistant: sleep: the sleep is over").await;
    // Periodic work of the runtime ends at some point.
    let quiet = async || {
        let before = rap.cpu_time();
        tokio::time::sleep(Duration::from_secs(1)).await;
        (rap.cpu_time() - before < Duration::from_millis(50)).then_some(())
    };
    until("a second with next to no CPU time", quiet).await;
}
