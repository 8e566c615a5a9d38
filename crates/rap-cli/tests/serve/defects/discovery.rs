//! A new session whose tool server does not answer.

use rap_testkit::peer::Reply;
use rap_testkit::tools::DISCOVERY;
use rap_testkit::{Rap, Setup, Tools, until};

/// Opens a session that can only use the known toolset of the server. Returns its notices.
async fn works_with_the_known_toolset(rap: &Rap, tools: &Tools) -> Vec<String> {
    let thread = rap.open("call work {}").await;
    let asked = async || {
        let call = tools.invocation().await;
        assert_eq!((call.thread(), &call.request.body["toolset_version"]), (thread.as_str(), &"1".into()));
        call.returns("here").await;
    };
    let unknown = async || {
        rap.transcript(&thread).await.into_iter().find(|line| line.contains("there is no tool `work`"))
    };
    tokio::select! {
        () = asked() => {}
        told = until("an error", unknown) => panic!("the toolset of the other session is not used: {told}"),
    }
    rap.until_line(&thread, "assistant: work: here").await;
    let transcript = rap.transcript(&thread).await;
    transcript.into_iter().filter(|line| line.starts_with("notice: ")).collect()
}

#[tokio::test]
async fn a_new_session_uses_the_toolset_that_another_one_was_given_and_says_so() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("discovery_timeout = \"300ms\"").start();
    let known = rap.open("say hello").await;
    rap.until_idle(&known).await;
    tools.answer_always(DISCOVERY, Reply::Hang);
    let notices = works_with_the_known_toolset(&rap, &tools).await;
    assert!(notices.len() == 1 && notices[0].contains(&tools.url), "{notices:?}");
    // The same after a restart.
    let rap = rap.restarted();
    let notices = works_with_the_known_toolset(&rap, &tools).await;
    assert!(notices.len() == 1 && notices[0].contains(&tools.url), "{notices:?}");
}
