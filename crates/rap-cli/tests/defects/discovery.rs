//! A new session whose tool server does not answer.

use super::support::peer::Reply;
use super::support::tools::DISCOVERY;
use super::support::{Rap, Setup, Tools, until};

/// Opens a session that can only use what is known of the server, and gives its notices.
async fn works_all_the_same(rap: &Rap, tools: &Tools) -> Vec<String> {
    let thread = rap.open("call work {}").await;
    let asked = async || {
        let call = tools.invocation().await;
        assert_eq!((call.thread(), &call.asked.body["toolset_version"]), (thread.as_str(), &"1".into()));
        call.returns("here").await;
    };
    let unknown =
        async || rap.story(&thread).await.into_iter().find(|line| line.contains("there is no tool `work`"));
    tokio::select! {
        () = asked() => {}
        told = until("an error", unknown) => panic!("the toolset of the other session is not used: {told}"),
    }
    rap.until_line(&thread, "assistant: work: here").await;
    let story = rap.story(&thread).await;
    story.into_iter().filter(|line| line.starts_with("notice: ")).collect()
}

#[tokio::test]
async fn a_new_session_uses_the_toolset_that_another_one_was_given_and_says_so() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("discovery_timeout = \"300ms\"").start();
    let known = rap.open("say hello").await;
    rap.until_idle(&known).await;
    tools.answer_always(DISCOVERY, Reply::Hang);
    let notices = works_all_the_same(&rap, &tools).await;
    assert!(notices.len() == 1 && notices[0].contains(&tools.url), "{notices:?}");
    // Also a runtime that has only read of it.
    let rap = rap.restarted();
    let notices = works_all_the_same(&rap, &tools).await;
    assert!(notices.len() == 1 && notices[0].contains(&tools.url), "{notices:?}");
}
