//! Sleep, wait and schedules, across restarts.

use rap_testkit::tools::CANCEL;
use rap_testkit::{Rap, Tools};
use serde_json::Value;

#[tokio::test]
async fn a_sleep_ends_in_time_after_a_crash() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call sleep {\"seconds\": 2}").await;
    let asleep = rap.until_status(&thread, "waiting").await;
    assert_eq!(asleep["waiting_on"][0]["tool"], "sleep");
    let timers = rap.listing("timers").await;
    assert_eq!((&timers[0]["kind"], &timers[0]["at"]), (&"sleep".into(), &asleep["waiting_on"][0]["until"]));
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: sleep: the sleep is over").await;
    assert!(rap.listing("timers").await.is_empty());
}

#[tokio::test]
async fn a_sleep_that_was_over_while_the_runtime_was_down_ends_at_once() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call sleep {\"seconds\": 0.3}").await;
    rap.until_status(&thread, "waiting").await;
    let rap = rap.restarted_after(std::time::Duration::from_millis(400));
    let begun = std::time::Instant::now();
    rap.until_line(&thread, "assistant: sleep: the sleep is over").await;
    assert!(begun.elapsed() < std::time::Duration::from_secs(10), "timeouts wait for 30 s, sleep does not");
}

#[tokio::test]
async fn any_input_ends_a_sleep() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch {}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call sleep_until {\"time\": \"2030-01-01T00:00\", \"timezone\": \"Europe/Berlin\"}")
        .await;
    rap.until_status(&thread, "waiting").await;
    watch.says(&watch.inline("ding")).await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    assert!(
        transcript.iter().any(|line| line.ends_with(": ended because something else happened")),
        "{transcript:?}"
    );
    assert!(transcript.iter().any(|line| line.ends_with(": ding")), "{transcript:?}");

    rap.say(&thread, "call wait {}").await;
    rap.until_status(&thread, "waiting").await;
    rap.say(&thread, "say awake").await;
    rap.until_line(&thread, "assistant: awake").await;

    rap.say(&thread, "call wait {}").await;
    rap.until_status(&thread, "waiting").await;
    rap.act(&thread, "interrupt").await.expect(202);
    rap.until_idle(&thread).await;
    // Tool servers are not notified of calls of built-in tools.
    assert_eq!(tools.count(CANCEL), 0);
}

#[tokio::test]
async fn a_schedule_wakes_repeatedly_until_it_is_cancelled() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call schedule {\"cron\": \"* * * * * *\", \"text\": \"tea\"}").await;
    rap.until_line(&thread, "assistant: schedule: tea").await;
    let rap = rap.restarted();
    let ticks = async |rap: &Rap| {
        rap.transcript(&thread).await.iter().filter(|line| *line == "assistant: schedule: tea").count()
    };
    let before = ticks(&rap).await;
    rap_testkit::until("another tick", async || (ticks(&rap).await > before).then_some(())).await;
    assert_eq!(rap.listing("subscriptions").await[0]["tool"], "schedule");
    assert_eq!(rap.listing("timers").await[0]["kind"], "schedule");
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    rap.until(&thread, "no subscription", |thread| thread["subscriptions"].as_array().unwrap().is_empty())
        .await;
    assert!(rap.listing("timers").await.is_empty());
    assert_eq!(tools.count(CANCEL), 0);
}

/// Times at which a schedule that fires every two seconds woke the thread, rounded to two seconds.
async fn ticks(rap: &Rap, thread: &str) -> Vec<(String, u32)> {
    let two_seconds = |entry: &Value| {
        let at = entry["at"].as_str().unwrap();
        (at[..17].to_owned(), at[17..19].parse::<u32>().unwrap() / 2)
    };
    let history = rap.history(thread).await;
    let ticks = history.iter().filter(|entry| entry["kind"] == "result" && entry["content"] == "tick");
    ticks.map(two_seconds).collect()
}

#[tokio::test]
async fn a_schedule_that_missed_times_fires_once_and_continues() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call schedule {\"cron\": \"*/2 * * * * *\", \"text\": \"tick\"}").await;
    rap_testkit::until("a tick", async || (!ticks(&rap, &thread).await.is_empty()).then_some(())).await;
    let before = ticks(&rap, &thread).await;
    // At least two missed times.
    let rap = rap.restarted_after(std::time::Duration::from_millis(4_200));
    let went_on = async || Some(ticks(&rap, &thread).await).filter(|ticks| ticks.len() >= before.len() + 2);
    let all = rap_testkit::until("more ticks", went_on).await;
    assert!(all.is_sorted_by(|one, next| one < next), "two in the same two seconds: {all:?}");
    let (last, first) = (&all[before.len() - 1], &all[before.len()]);
    assert!(last.0 != first.0 || last.1 + 2 <= first.1, "it was not down for long enough: {all:?}");
    let next = rap.listing("timers").await[0]["at"].as_str().unwrap().to_owned();
    assert!(next[17..19].parse::<u32>().unwrap() % 2 == 0, "out of its rhythm: {next}");
}

#[tokio::test]
async fn an_invalid_time_is_explained_to_the_model() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let asked = [
        "call schedule {\"cron\": \"daily\", \"text\": \"x\"}",
        "call schedule {\"cron\": \"0 0 30 2 *\", \"text\": \"x\"}",
        "call schedule {\"cron\": \"0 8 * * *\", \"timezone\": \"Mars\", \"text\": \"x\"}",
        "call sleep {\"seconds\": -1}",
        "call sleep {\"seconds\": 1e12}",
        "call sleep_until {\"time\": \"soon\"}",
    ];
    let thread = rap.open(&asked.join("\n")).await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    for told in [
        "call_1_1: Error: `daily` is not a cron expression",
        "call_1_2: Error: $.cron: the expression matches no date",
        "call_1_3: Error: `Mars` is not a time zone",
        "call_1_4: Error: $.seconds: expected a number of seconds, 0 or more",
        "call_1_5: Error: a sleep lasts at most 3660 days",
        "call_1_6: Error: `soon` is not a time",
    ] {
        assert!(
            transcript.iter().any(|line| line.starts_with(&format!("result {told}"))),
            "{told}: {transcript:?}"
        );
    }
}
