//! The example `examples/repo-watcher`, with a model whose answers are written here.

use std::fs;
use std::path::Path;
use std::process::Command;

use rap_testkit::model::ModelServer;
use rap_testkit::{Rap, Setup, until};
use serde_json::json;

/// Returns the runtime of the example, with another model.
fn start(model: &ModelServer, directory: tempfile::TempDir) -> Rap {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/repo-watcher/rap.toml");
    let mut setup =
        Setup::new().variable("PATH", "/usr/local/bin:/usr/bin:/bin").variable("ANTHROPIC_API_KEY", "none");
    for line in model.lines().lines() {
        let (key, value) = line.split_once(" = ").unwrap();
        setup = setup.variable(&format!("RAP_MODEL_{}", key.to_uppercase()), value.trim_matches('"'));
    }
    let mut rap = setup.variable("RAP_LIMITS_DISCOVERY_WAIT", "20s").prepare(directory);
    fs::copy(path, rap.directory().join("rap.toml")).unwrap();
    rap.start_again();
    rap
}

/// Waits until this many event threads have ended.
async fn until_handled(rap: &Rap, thread: &str, count: usize) {
    until("the thread of the event to end", async || {
        let children = rap.children(thread).await;
        children.len() == count && children.iter().all(|child| child["status"] == "closed")
    })
    .await;
}

#[tokio::test]
async fn the_agent_runs_the_tests_after_a_change_and_speaks_up_only_when_they_break() {
    let (model, directory) = (ModelServer::start().await, tempfile::tempdir().unwrap());
    let repo = directory.path().join("repo");
    fs::create_dir(&repo).unwrap();
    fs::write(repo.join("Makefile"), "test:\n\tsh test.sh\n").unwrap();
    fs::write(repo.join("test.sh"), "test $(cat sum) = 4\n").unwrap();
    fs::write(repo.join("sum"), "4").unwrap();
    assert!(Command::new("git").args(["init", "--quiet"]).current_dir(&repo).status().unwrap().success());
    let rap = start(&model, directory);

    model.calls(&[("w", "watch_files", json!({"path": "."}))]);
    model.says("I watch the repository.");
    let thread = rap.open("start").await;
    rap.until_line(&thread, "assistant: I watch the repository.").await;

    let test = ("t", "run_command", json!({"command": "make test", "cwd": "repo"}));
    model.calls(std::slice::from_ref(&test));
    model.says("Fine.");
    fs::write(repo.join("notes"), "x").unwrap();
    until_handled(&rap, &thread, 1).await;
    let spoken = rap.raw_history(&thread).await.len();

    model.calls(&[test]);
    model.calls(&[("r", "report_to_parent", json!({"report": "The tests broke: test.sh expects 4."}))]);
    model.says("Told.");
    model.says("Told.");
    fs::write(repo.join("sum"), "5").unwrap();
    until("the report", async || {
        let history = rap.raw_history(&thread).await;
        history
            .iter()
            .skip(spoken)
            .any(|entry| entry.to_string().contains("The tests broke: test.sh expects 4."))
    })
    .await;
    let mut results = Vec::new();
    for child in rap.children(&thread).await {
        let history = rap.raw_history(child["id"].as_str().unwrap()).await;
        let texts = history.iter().filter_map(|entry| Some(entry["content"].as_str()?.to_owned()));
        results.extend(texts.filter(|text| text.contains("exit_code")));
    }
    assert_eq!(results.iter().filter(|text| text.contains("\"exit_code\":0")).count(), 1, "{results:?}");
    assert_eq!(results.iter().filter(|text| text.contains("\"exit_code\":2")).count(), 1, "{results:?}");
}
