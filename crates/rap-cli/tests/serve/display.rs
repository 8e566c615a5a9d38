//! Display texts of calls and results for people, while the model sees the full content.

use rap_testkit::model::ModelServer;
use rap_testkit::tools::{tool, with};
use rap_testkit::{Rap, Setup, Tools};
use serde_json::{Value, json};

/// A server whose tools have these display scripts, by name.
async fn scripted(scripts: &[(&str, &str)]) -> Tools {
    let tools = Tools::start().await;
    let made = scripts.iter().map(|(name, script)| with(tool(name), json!({"displayScript": script})));
    tools.offer(tools.document("bench", "1", made.collect()));
    tools
}

/// Runs a client command and returns its output.
fn command(rap: &Rap, arguments: &[&str]) -> String {
    let (code, output) = rap.command(arguments);
    assert_eq!(code, Some(0), "{output}");
    output
}

fn displays(history: &[Value]) -> Vec<&str> {
    let calls = history.iter().flat_map(|entry| entry["calls"].as_array().into_iter().flatten());
    calls.map(|call| call["display"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn people_see_display_texts_and_the_model_sees_the_result() {
    let tools = scripted(&[("read", "`Read ${args.path}`"), ("bare", "")]).await;
    let model = ModelServer::start().await;
    model.calls(&[("a", "read", json!({"path": "x.txt"})), ("b", "bare", json!({"n": 1}))]);
    model.says("Done.");
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    let thread = rap.open("go").await;
    let calls = tools.invocations(2).await;
    // The display text of an open call is stored with it.
    let rap = rap.restarted();
    let shown = command(&rap, &["threads", "show", &thread]);
    let [read, bare] = [calls[0].id(), calls[1].id()];
    assert!(shown.contains(&format!("waiting for `read`, Read x.txt, ({read}) for ")), "{shown}");
    assert!(shown.contains(&format!("waiting for `bare` ({bare}) for ")), "{shown}");
    let image = json!({"type": "image", "content": {"data": "aGk=", "mediaType": "image/png"}});
    let text = json!({"type": "text", "content": "3 lines"});
    let later = json!({"type": "hologram", "content": 5});
    calls[0].says(&with(calls[0].result("all of it"), json!({"display_as": [later, image, text]}))).await;
    calls[1].returns("plain").await;
    rap.until_idle(&thread).await;

    let before = rap.history(&thread).await;
    // The server has another display script now; stored display texts do not change.
    let changed = with(tool("read"), json!({"displayScript": "\"Other words\""}));
    tools.offer(tools.document("bench", "2", vec![changed, tool("bare")]));
    let rap = rap.restarted();
    let history = rap.history(&thread).await;
    assert_eq!(history, before);
    assert_eq!(displays(&history), ["Read x.txt", "bare({\"n\":1})"]);
    assert_eq!(history[2]["content"], "all of it");
    assert_eq!(history[2]["display"], json!([image, text]));
    assert_eq!(history[3]["display"], json!([]));
    let tail = command(&rap, &["threads", "tail", "--once", &thread]);
    assert!(tail.contains(&format!("Read x.txt ({read})")), "{tail}");
    assert!(tail.contains("read: 3 lines") && !tail.contains("all of it"), "{tail}");
    assert!(tail.contains("bare: plain"), "{tail}");
    model.question().await;
    let asked = model.question().await.to_string();
    assert!(
        asked.contains("all of it") && !asked.contains("3 lines") && !asked.contains("Read x.txt"),
        "{asked}"
    );
}

#[tokio::test]
async fn a_hostile_manifest_takes_nothing_down() {
    let deep = format!("{}1{}", "(".repeat(5000), ")".repeat(5000));
    let scripts = [
        ("loops", "loop {}"),
        ("grows", "let s = \"x\"; loop { s += s; }"),
        ("nests", "let a = []; loop { a = [a]; }"),
        ("recurses", "fn f() { f() } f()"),
        ("long", "let s = \"\"; for i in 0..300 { s += \"xxxx\"; } s"),
        ("broken", "((("),
        ("deep", &deep),
        ("sleeps", "sleep(60); \"slept\""),
        ("prints", "print(\"hello\"); \"printed\""),
        ("good", "\"fine \" + args.n"),
    ];
    let tools = scripted(&scripts).await;
    let rap = Rap::start(&tools);
    let lines: Vec<String> = scripts.iter().map(|(name, _)| format!("call {name} {{\"n\": 1}}")).collect();
    let thread = rap.open(&lines.join("\n")).await;
    for call in tools.invocations(scripts.len()).await {
        call.returns("done").await;
    }
    rap.until_idle(&thread).await;
    let history = rap.history(&thread).await;
    let plain = scripts[..9].iter().map(|(name, _)| format!("{name}({{\"n\":1}})"));
    let expected: Vec<String> = plain.chain(["fine 1".to_owned()]).collect();
    assert_eq!(displays(&history), expected);
    let log = rap.log();
    for (name, _) in &scripts[..9] {
        let told = log.lines().any(|line| line.contains("displayScript") && line.contains(name));
        assert!(told, "no reason for {name} in:\n{log}");
    }
}
