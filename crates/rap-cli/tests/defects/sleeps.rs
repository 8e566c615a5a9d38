//! A message that waits until the thread would be idle ends what only sleeps or waits.

use super::support::{Rap, Tools};

/// What a sleep or wait returns when something else ends it.
const ENDED: &str = ": something happened; it follows";

/// Position of the first line with this end.
fn place(story: &[String], end: &str) -> usize {
    let found = story.iter().position(|line| line.ends_with(end));
    found.unwrap_or_else(|| panic!("no line ends with {end:?}: {story:#?}"))
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
        rap.say_so(&thread, "say later", "enqueue").await.expect(202);
        rap.until_line(&thread, "assistant: later").await;
        let story = rap.story(&thread).await;
        assert!(place(&story, ENDED) < place(&story, "user: say later"), "{story:#?}");
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
        rap.say_so(&thread, "say later", "enqueue").await.expect(202);
        let waiting = rap.thread(&thread).await;
        assert_eq!((&waiting["status"], &waiting["held"]), (&"waiting".into(), &1.into()), "{waiting}");
        let tools: Vec<_> =
            waiting["waiting_on"].as_array().unwrap().iter().map(|call| &call["tool"]).collect();
        assert!(tools.contains(&&"work".into()), "the tool is still at work: {waiting}");
        work.returns("done").await;
        rap.until_line(&thread, "assistant: later").await;
        let story = rap.story(&thread).await;
        let said = place(&story, "user: say later");
        assert!(place(&story, ": done") < said && place(&story, ENDED) < said, "{story:#?}");
        assert_eq!(rap.until_idle(&thread).await["held"], 0);
    }
}

/// What was enqueued before the model went to sleep counts as well.
#[tokio::test]
async fn a_message_that_was_enqueued_before_the_sleep_began_ends_it_too() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("sleep 0.5\ncall wait {}").await;
    rap.say_so(&thread, "say later", "enqueue").await.expect(202);
    rap.until_line(&thread, "assistant: later").await;
    assert_eq!(rap.until_idle(&thread).await["held"], 0);
}
