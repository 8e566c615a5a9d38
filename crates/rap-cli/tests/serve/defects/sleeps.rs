//! An enqueued message ends a sleep and a wait.

use rap_testkit::{Rap, Tools};

/// Result of a sleep or wait that other input ends.
const ENDED: &str = ": ended because something else happened";

/// Index of the first line with this suffix.
fn place(transcript: &[String], end: &str) -> usize {
    let found = transcript.iter().position(|line| line.ends_with(end));
    found.unwrap_or_else(|| panic!("no line ends with {end:?}: {transcript:#?}"))
}

#[tokio::test]
async fn an_enqueued_message_ends_a_wait_and_a_long_sleep() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for call in
        ["call wait {}", "call sleep {\"seconds\": 86400}", "call wait {}\ncall sleep {\"seconds\": 86400}"]
    {
        let thread = rap.open(call).await;
        rap.until_status(&thread, "waiting").await;
        rap.say_on_busy(&thread, "say later", "enqueue").await.expect(202);
        rap.until_line(&thread, "assistant: later").await;
        let transcript = rap.transcript(&thread).await;
        assert!(place(&transcript, ENDED) < place(&transcript, "user: say later"), "{transcript:#?}");
        assert_eq!(rap.until_idle(&thread).await["held"], 0);
    }
}

#[tokio::test]
async fn an_enqueued_message_waits_for_a_tool_and_then_ends_the_sleep_beside_it() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for call in ["call sleep {\"seconds\": 86400}", "call wait {}"] {
        let thread = rap.open(&format!("call work {{}}\n{call}")).await;
        let work = tools.invocation().await;
        rap.until_status(&thread, "waiting").await;
        rap.say_on_busy(&thread, "say later", "enqueue").await.expect(202);
        let waiting = rap.thread(&thread).await;
        assert_eq!((&waiting["status"], &waiting["held"]), (&"waiting".into(), &1.into()), "{waiting}");
        let tools: Vec<_> =
            waiting["waiting_on"].as_array().unwrap().iter().map(|call| &call["tool"]).collect();
        assert!(tools.contains(&&"work".into()), "the tool is still at work: {waiting}");
        work.returns("done").await;
        rap.until_line(&thread, "assistant: later").await;
        let transcript = rap.transcript(&thread).await;
        let said = place(&transcript, "user: say later");
        assert!(place(&transcript, ": done") < said && place(&transcript, ENDED) < said, "{transcript:#?}");
        assert_eq!(rap.until_idle(&thread).await["held"], 0);
    }
}

#[tokio::test]
async fn a_message_that_was_enqueued_before_the_sleep_began_ends_it_too() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("sleep 0.5\ncall wait {}").await;
    rap.say_on_busy(&thread, "say later", "enqueue").await.expect(202);
    rap.until_line(&thread, "assistant: later").await;
    assert_eq!(rap.until_idle(&thread).await["held"], 0);
}
