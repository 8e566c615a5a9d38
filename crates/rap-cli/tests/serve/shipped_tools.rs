//! The tool servers that ship with rap, started by `rap serve` with `run = "NAME"`.

use std::fs;

use rap_io::moving;
use rap_io::secret_box::Key;
use rap_protocol::Timestamp;
use rap_testkit::marked::{mark, until_marked, with_mark};
use rap_testkit::peer::Reply;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Calls a tool and allows it, if a person is asked. Returns the text of its result.
async fn call(rap: &Rap, thread: &str, tool: &str, arguments: &Value) -> String {
    let before = rap.raw_history(thread).await.len();
    rap.say(thread, &format!("call {tool} {arguments}")).await;
    until(&format!("the result of {tool}"), async || {
        allow(rap, thread).await;
        let history = rap.raw_history(thread).await;
        // The report of a child or an event may come in between, as the result of a synthetic call.
        let is_own = |entry: &&Value| entry["kind"] == "result" && entry["synthetic"] == false;
        let result = history.iter().skip(before).find(is_own)?;
        Some(result["content"].as_str().unwrap_or_else(|| panic!("{result}")).to_owned())
    })
    .await
}

/// Allows every call of a thread that waits for a person.
async fn allow(rap: &Rap, thread: &str) {
    for question in rap.raw_listing("inbox").await {
        if question["thread_id"] == thread {
            let path = format!("/v1/threads/{thread}/calls/{}/choice", question["call_id"].as_str().unwrap());
            // It may have been answered already.
            rap.post(&path, &json!({"selected": 0})).await;
        }
    }
}

async fn run(rap: &Rap, thread: &str, command: &str) -> Value {
    let text = call(rap, thread, "run_command", &json!({"command": command})).await;
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"))
}

/// Waits until a thread that was spawned for an event has this text in its history.
async fn until_event(rap: &Rap, thread: &str, text: &str) {
    until(text, async || {
        for child in rap.children(thread).await {
            let history = rap.raw_history(child["id"].as_str().unwrap()).await;
            if history.iter().any(|entry| entry.to_string().contains(text)) {
                return true;
            }
        }
        false
    })
    .await;
}

async fn open(rap: &Rap) -> String {
    let thread = rap.open("hello").await;
    rap.until_idle(&thread).await;
    thread
}

#[tokio::test]
async fn a_command_has_output_an_exit_code_and_a_workspace_but_no_secrets() {
    let setup = Setup::new().tool_lines("run = \"shell\"").variable("RAP_TOKEN", "hidden-token");
    let rap = setup.variable("PATH", "/usr/local/bin:/usr/bin:/bin").start();
    let thread = open(&rap).await;
    let result = run(&rap, &thread, "cat; echo out; echo err >&2; printf 'caf\\351'; exit 3").await;
    assert_eq!(result, json!({"exit_code": 3, "output": "out\nerr\ncaf\u{fffd}", "truncated": false}));
    let environment = run(&rap, &thread, "env; cat /proc/$PPID/environ").await.to_string();
    assert!(environment.contains("RAP_WORKSPACE=") && !environment.contains("hidden-token"), "{environment}");
    assert!(!environment.contains("RAP_TOOL_BEARER"), "{environment}");

    run(&rap, &thread, "mkdir sub; echo text > sub/file").await;
    let arguments = json!({"command": "cat file; pwd", "cwd": "sub"});
    let result = call(&rap, &thread, "run_command", &arguments).await;
    assert!(result.contains("text\\n") && result.contains("/sub\\n"), "{result}");
    for cwd in ["../..", "/etc", "missing"] {
        let refused = call(&rap, &thread, "run_command", &json!({"command": "pwd", "cwd": cwd})).await;
        assert!(refused.starts_with(&format!("Error: cwd {cwd:?} cannot be used")), "{refused}");
    }
    let long = run(&rap, &thread, "seq 1 1000000").await;
    let text = long["output"].as_str().unwrap();
    assert!(text.starts_with("1\n2\n") && text.ends_with("999999\n1000000\n") && text.len() < 200_000);
    assert_eq!(long["truncated"], true);
    let arguments = json!({"command": "echo begun; sleep 1000", "timeout_seconds": 1});
    let late = call(&rap, &thread, "run_command", &arguments).await;
    assert!(late.contains("timed out") && late.contains("begun"), "{late}");
    assert_eq!(serde_json::from_str::<Value>(&late).unwrap()["exit_code"], Value::Null);
}

/// Proves: TC-11, CN-12
#[tokio::test]
async fn background_processes_go_on_until_their_thread_is_closed() {
    let rap = Setup::new().tool_lines("run = \"shell\"").start();
    let (thread, other, first, second) = (open(&rap).await, open(&rap).await, mark(), mark());
    let started =
        format!("setsid sleep {first} & (env -i setsid sleep {first} > /dev/null 2>&1 &) ; echo started");
    assert_eq!(run(&rap, &thread, &started).await["output"], "started\n");
    run(&rap, &other, &format!("sleep {second} &")).await;
    until_marked(&first, 2).await;
    assert_eq!(run(&rap, &thread, "echo again").await["output"], "again\n");
    assert_eq!(with_mark(&first).len(), 2);
    rap.close(&thread).await;
    until_marked(&first, 0).await;
    assert_eq!(with_mark(&second).len(), 1);
    // Only the workspace of the other thread is left, and the file that names its thread.
    let workspaces = rap.directory().join("rap-data/shell/threads");
    until("the workspace to be removed", async || fs::read_dir(&workspaces).unwrap().count() == 2).await;
    let mut rap = rap;
    rap.stop();
    until_marked(&second, 0).await;
}

/// The result of a command waits for the output that a background process still writes, for up to two seconds.
///
/// Proves: TC-11, CN-12
#[tokio::test]
async fn a_thread_that_is_closed_while_the_result_waits_leaves_no_process() {
    let rap = Setup::new().tool_lines("run = \"shell\"").start();
    let (thread, mark) = (open(&rap).await, mark());
    let workspaces = rap.directory().join("rap-data/shell/threads");
    let command =
        format!("setsid sleep {mark} & (while :; do echo x; sleep 0.02; done) & echo $$ > new; mv new pid");
    rap.say(&thread, &format!("call run_command {}", json!({"command": command}))).await;
    let shell = until("the shell", async || {
        allow(&rap, &thread).await;
        let mut threads = fs::read_dir(&workspaces).ok()?.flatten();
        threads.find_map(|thread| fs::read_to_string(thread.path().join("pid")).ok())
    })
    .await;
    until("the end of the shell", async || !fs::exists(format!("/proc/{}", shell.trim())).unwrap()).await;
    assert_eq!(until_marked(&mark, 1).await.len(), 1);
    rap.close(&thread).await;
    until_marked(&mark, 0).await;
    until("the workspace to be removed", async || fs::read_dir(&workspaces).unwrap().count() == 0).await;
}

/// Proves: CN-12
#[tokio::test]
async fn cancelling_a_command_ends_its_processes() {
    let rap = Setup::new().tool_lines("run = \"shell\"").start();
    let (thread, mark) = (open(&rap).await, mark());
    let arguments = json!({"command": format!("setsid sleep {mark} & trap '' TERM; sleep {mark}")});
    rap.say(&thread, &format!("call run_command {arguments}")).await;
    until("two processes", async || {
        allow(&rap, &thread).await;
        with_mark(&mark).len() == 2
    })
    .await;
    let id = rap.call(&thread, "call_2_1").await;
    rap.post(&format!("/v1/threads/{thread}/calls/{id}/cancel"), &json!({})).await.expect(202);
    until_marked(&mark, 0).await;
}

#[tokio::test]
async fn a_child_thread_sees_the_workspace_of_its_parent() {
    let rap = Setup::new().tool_lines("run = \"shell\"").start();
    let thread = open(&rap).await;
    run(&rap, &thread, "mkdir repo; echo text > repo/file").await;
    let instructions =
        format!("call run_command {}", json!({"command": "cat repo/file; echo more >> repo/file"}));
    rap.say(&thread, &format!("call spawn_thread {}", json!({"instructions": instructions}))).await;
    let child = rap.child(&thread).await;
    until("the result of the child", async || {
        allow(&rap, &child).await;
        rap.raw_history(&child).await.iter().any(|entry| entry["content"].to_string().contains("text\\\\n"))
    })
    .await;
    rap.close(&child).await;
    assert_eq!(run(&rap, &thread, "cat repo/file").await["output"], "text\nmore\n");
}

#[tokio::test]
async fn a_streamed_command_sends_its_output_as_events_and_ends_with_the_exit_code() {
    let rap = Setup::new().tool_lines("run = \"shell\"").start();
    let thread = open(&rap).await;
    let command = "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two; exit 4";
    let confirmed = call(&rap, &thread, "run_command", &json!({"command": command, "stream": true})).await;
    assert!(confirmed.starts_with("The command runs"), "{confirmed}");
    let has = async |text: &str| {
        rap.raw_history(&thread).await.iter().any(|entry| entry.to_string().contains(text))
    };
    until("the first output", async || has("one\\\\n").await || has("one\\n").await).await;
    run(&rap, &thread, "touch go").await;
    until("the exit code", async || has("exit_code").await && has("two").await).await;
    until("the end", async || rap.thread(&thread).await["subscriptions"] == json!([])).await;
}

#[tokio::test]
async fn a_command_that_is_not_on_the_list_is_asked_about_once_in_a_session() {
    let rap = Setup::new().tool_lines("run = \"shell\"\nallow = [\"echo *\"]").start();
    let tools = rap.get("/v1/tools").await.expect(200).to_string();
    assert!(!tools.contains("destructive"), "{tools}");
    let thread = rap.open("call run_command {\"command\": \"echo free\"}").await;
    rap.until_idle(&thread).await;
    let ask = async |thread: &str, selected: usize| {
        rap.say(thread, "call run_command {\"command\": \"echo a; echo b\"}").await;
        rap.until_status(thread, "needs_you").await;
        let question = rap.listing("inbox").await.remove(0);
        assert!(question["prompt"].as_str().unwrap().contains("echo a; echo b"), "{question}");
        let path = format!("/v1/threads/{thread}/calls/{}/choice", question["call_id"].as_str().unwrap());
        rap.post(&path, &json!({"selected": selected})).await.expect(202);
        rap.until_idle(thread).await;
    };
    ask(&thread, 2).await;
    let transcript = rap.transcript(&thread).await;
    assert!(transcript.iter().any(|line| line.contains("Error: a person refused to run this command")));
    ask(&thread, 1).await;
    rap.say(&thread, "call run_command {\"command\": \"echo a; echo b\"}").await;
    rap.until_idle(&thread).await;
    let results = rap.transcript(&thread).await.iter().filter(|line| line.contains("a\\nb\\n")).count();
    assert!(results >= 2, "{:?}", rap.transcript(&thread).await);
    let other = rap.open("hello").await;
    ask(&other, 0).await;
}

#[tokio::test]
async fn files_are_read_written_listed_searched_and_watched_below_the_root_only() {
    let rap = Setup::new().tool_lines("run = \"files\"").start();
    let thread = open(&rap).await;
    let written =
        call(&rap, &thread, "write_file", &json!({"path": "a/b.txt", "content": "one\ntwo\n"})).await;
    assert_eq!(written, "wrote 8 bytes to a/b.txt");
    let root = rap.directory().join("rap-data/files/files");
    assert_eq!(fs::read_to_string(root.join("a/b.txt")).unwrap(), "one\ntwo\n");
    assert_eq!(call(&rap, &thread, "read_file", &json!({"path": "a/b.txt"})).await, "one\ntwo\n");
    let listed = call(&rap, &thread, "list_files", &json!({"path": "."})).await;
    assert_eq!(listed, "{\"entries\":[{\"name\":\"a\",\"type\":\"directory\"}],\"truncated\":false}");
    let found = call(&rap, &thread, "search_files", &json!({"path": ".", "pattern": "^t.o$"})).await;
    assert_eq!(found, "a/b.txt:2: two");
    let wrong = call(&rap, &thread, "search_files", &json!({"path": ".", "pattern": "("})).await;
    assert!(wrong.starts_with("Error: the pattern is not a regular expression"), "{wrong}");

    std::os::unix::fs::symlink(rap.directory(), root.join("out")).unwrap();
    std::os::unix::fs::symlink("../../../rap.toml", root.join("config")).unwrap();
    fs::write(rap.directory().join("secret"), "hidden").unwrap();
    for path in ["out/secret", "../../../secret", "config", "/etc/passwd", "a/../../../../secret"] {
        let refused = call(&rap, &thread, "read_file", &json!({"path": path})).await;
        assert!(refused.starts_with("Error: "), "{path}: {refused}");
        let refused = call(&rap, &thread, "write_file", &json!({"path": path, "content": "x"})).await;
        assert!(refused.starts_with("Error: "), "{path}: {refused}");
        let refused = call(&rap, &thread, "watch_files", &json!({"path": path})).await;
        assert!(refused.starts_with("Error: "), "{path}: {refused}");
    }
    assert_eq!(fs::read_to_string(rap.directory().join("secret")).unwrap(), "hidden");
    let found = call(&rap, &thread, "search_files", &json!({"path": ".", "pattern": "hidden"})).await;
    assert_eq!(found, "no matches");

    let watching = call(&rap, &thread, "watch_files", &json!({"path": ".", "glob": "**/*.txt"})).await;
    assert!(watching.starts_with("Watching 1 files."), "{watching}");
    fs::write(root.join("a/new.txt"), "x").unwrap();
    fs::write(root.join("a/new.rs"), "x").unwrap();
    until_event(&rap, &thread, "a/new.txt").await;
    // Changes made while the server is not running are reported after its restart.
    let mut rap = rap;
    rap.stop();
    fs::write(root.join("a/later.txt"), "x").unwrap();
    rap.start_again();
    until_event(&rap, &thread, "a/later.txt").await;
}

#[tokio::test]
async fn fetch_returns_text_and_keeps_to_the_url_policy() {
    let site = Tools::start().await;
    let page =
        "<html><head><style>x{}</style></head><body><h1>Title</h1><p>Some &amp; text</p></body></html>";
    let full = |status, name, value: &str, body: &'static str| {
        Reply::Full(status, Some((name, value.into())), body.into())
    };
    site.answer_always("/page", full(200, "content-type", "text/html", page));
    site.answer_always("/moved", full(302, "location", "/page", ""));
    let url = |path: &str| format!("{}{path}", site.url);
    let rap = Setup::new().tool_lines("run = \"http\"").start();
    let thread = open(&rap).await;
    for path in ["/page", "/moved"] {
        let text = call(&rap, &thread, "fetch", &json!({"url": url(path)})).await;
        let fetched: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
        assert_eq!(
            (&fetched["status"], &fetched["headers"]["content-type"]),
            (&json!(200), &json!("text/html"))
        );
        let body = fetched["body"].as_str().unwrap();
        assert!(body.contains("Title") && body.contains("Some & text") && !body.contains('<'), "{body}");
    }
    // The runtime itself is refused, whatever the policy is.
    let own = call(&rap, &thread, "fetch", &json!({"url": format!("{}/v1/threads", rap.url)})).await;
    assert!(own.starts_with("Error: the URL is not allowed"), "{own}");
    let wrong = call(&rap, &thread, "fetch", &json!({"url": "file:///etc/passwd"})).await;
    assert!(wrong.starts_with("Error: "), "{wrong}");

    let rap = Setup::new().tool_lines("run = \"http\"").server("url_policy = \"public\"").start();
    let thread = open(&rap).await;
    let refused = call(&rap, &thread, "fetch", &json!({"url": url("/page")})).await;
    assert!(refused.starts_with("Error: the URL is not allowed"), "{refused}");
    let host = site.url.strip_prefix("http://").unwrap();
    let allowed = format!("url_policy = \"public\"\nallow_hosts = [{host:?}]");
    let rap = Setup::new().tool_lines("run = \"http\"").server(&allowed).start();
    let thread = open(&rap).await;
    assert!(call(&rap, &thread, "fetch", &json!({"url": url("/page")})).await.starts_with('{'));
}

#[tokio::test]
async fn a_reminder_arrives_in_its_thread_also_after_a_restart() {
    let rap = Setup::new().tool_lines("run = \"timer\"").start();
    let thread = open(&rap).await;
    let confirmed = call(&rap, &thread, "remind", &json!({"in_seconds": 1, "text": "drink water"})).await;
    assert!(confirmed.starts_with("The reminder is due at 20"), "{confirmed}");
    let rap = rap.restarted();
    let reminded = async |text: &str| {
        let history = rap.raw_history(&thread).await;
        history
            .iter()
            .filter(|entry| entry["kind"] == "result" && entry["content"].to_string().contains(text))
            .count()
    };
    until("the reminder", async || reminded("drink water").await == 1).await;
    call(&rap, &thread, "every", &json!({"seconds": 1, "text": "stand up"})).await;
    until("two reminders", async || reminded("stand up").await >= 2).await;
    let wrong = call(&rap, &thread, "every", &json!({"text": "x"})).await;
    assert_eq!(wrong, "Error: give either cron or seconds");
}

/// Signs like GitHub: HMAC-SHA256 of the body, with a key of at most 64 bytes.
fn github_signature(key: &str, body: &str) -> String {
    let pad = |with: u8| {
        let mut block = [with; 64];
        block.iter_mut().zip(key.bytes()).for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(body).finalize();
    let mac = Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize();
    mac.iter().fold("sha256=".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// Proves: SE-23
#[tokio::test]
async fn a_webhook_is_forwarded_once_if_its_signature_is_valid_and_it_passes_the_filter() {
    let setup = Setup::new().tool_lines("run = \"webhook\"\nsecrets = { github = \"env:HOOK\" }");
    let rap = setup.variable("HOOK", "github-secret").start();
    let thread = open(&rap).await;
    let unknown = call(&rap, &thread, "subscribe_webhook", &json!({"source": "stripe"})).await;
    assert!(unknown.starts_with("Error: webhooks of \"stripe\" are not configured"), "{unknown}");
    let arguments = json!({"source": "github", "filter": {"event": "push", "/repository/name": "rap"}});
    let confirmed = call(&rap, &thread, "subscribe_webhook", &arguments).await;
    let url = confirmed.split_whitespace().find(|word| word.starts_with("http://")).unwrap().to_owned();
    let (base, token) = url.split_once("/hook/").unwrap();
    let sender = rap_testkit::Client::new(base, None);
    let send = async |event: &str, delivery: &str, signature: &str, body: &str| {
        let headers =
            [("x-github-event", event), ("x-github-delivery", delivery), ("x-hub-signature-256", signature)];
        sender.send("POST", &format!("/hook/{token}"), &headers, body.as_bytes()).await.status
    };
    let body = json!({"repository": {"name": "rap"}, "after": "c0ffee"}).to_string();
    let signature = github_signature("github-secret", &body);
    assert_eq!(send("push", "d1", &github_signature("other", &body), &body).await, 401);
    assert_eq!(send("push", "d1", &signature, &body.replace("c0ffee", "c0ffed")).await, 401);
    assert_eq!(send("issues", "d2", &signature, &body).await, 200);
    assert_eq!(send("push", "d3", &signature, &body).await, 200);
    assert_eq!(send("push", "d3", &signature, &body).await, 200);
    let missing = sender.send("POST", "/hook/0123", &[], b"{}").await.status;
    assert_eq!(missing, 404);
    // The id of a delivery is not signed, so a recorded webhook with another id is the same one.
    assert_eq!(send("push", "d4", &signature, &body).await, 200);
    // The last one shows that those before it were not forwarded.
    let next = body.replace("c0ffee", "c0ffef");
    assert_eq!(send("push", "d5", &github_signature("github-secret", &next), &next).await, 200);
    let forwarded = until("two events", async || {
        let children = rap.children(&thread).await;
        let mut texts = Vec::new();
        for child in children {
            let history = rap.raw_history(child["id"].as_str().unwrap()).await;
            texts.extend(history.iter().filter(|entry| entry["kind"] == "result").map(Value::to_string));
        }
        Some(texts).filter(|texts| texts.iter().any(|text| text.contains("\\\"d5\\\"")))
    })
    .await;
    let count = |delivery: &str| forwarded.iter().filter(|text| text.contains(delivery)).count();
    let counts = ["d1", "d2", "d3", "d4", "d5"].map(|delivery| count(&format!("\\\"{delivery}\\\"")));
    assert_eq!(counts, [0, 0, 1, 0, 1], "{forwarded:?}");
    assert!(forwarded.iter().any(|text| text.contains("c0ffee")), "{forwarded:?}");
}

/// A started tool server has a port that only its own machine reaches, so the runtime at the destination passes its
/// state on.
#[tokio::test(flavor = "multi_thread")]
async fn the_workspace_of_a_thread_moves_with_its_session() {
    const TOKEN: &str = "a-long-token-of-the-destination";
    let shell = |setup: Setup| {
        let setup = setup.tool_lines("run = \"shell\"\nmigration_key = \"env:MOVING_KEY\"");
        setup.variable("MOVING_KEY", &"3c".repeat(32)).start()
    };
    let (source, destination) = (shell(Setup::new()), shell(Setup::new().token(TOKEN)));
    let thread = open(&source).await;
    run(&source, &thread, "mkdir docs; echo kept > docs/file").await;
    let (code, text) = source.command(&["migrate", &thread, "--to", &destination.url, "--to-token", TOKEN]);
    assert_eq!(code, Some(0), "{text}\n{}\n{}", source.log(), destination.log());
    assert_eq!(run(&destination, &thread, "cat docs/file").await["output"], "kept\n");
    let workspaces = source.directory().join("rap-data/shell/threads");
    until("the workspace to be removed", async || fs::read_dir(&workspaces).unwrap().count() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn state_is_passed_on_only_from_who_knows_the_migration_key() {
    let key = "3c".repeat(32);
    let with_key = "run = \"shell\"\nmigration_key = \"env:MOVING_KEY\"";
    let setup = Setup::new().tool_lines(with_key).tool_lines("run = \"files\"");
    let rap = setup.variable("MOVING_KEY", &key).start();
    run(&rap, &open(&rap).await, "true").await;
    let key = Key::parse(&key).unwrap();
    let now = Timestamp::from(std::time::SystemTime::now());
    let proof = |path: &str| moving::proof(&key, path, now).to_str().unwrap().to_owned();
    let send = async |path: &str, proof: &str| {
        let headers = [("content-type", "application/json"), ("rap-migration-proof", proof)];
        let sent = rap.send("POST", &format!("/started/{path}"), &headers, b"{\"sealed\": \"AAAA\"}").await;
        (sent.status, sent.text)
    };
    let unknown = send("command:none/import_files", "").await;
    assert_eq!(unknown.0, 404);
    // Without the key, the response does not tell which tool servers exist.
    for (path, proof) in [
        ("command:shell/import_files", String::new()),
        ("command:shell/import_calls", proof("/import_files")),
        ("command:shell/invoke", proof("/invoke")),
        ("command:shell/..%2Finvoke", proof("/../invoke")),
        ("command:files/import_files", proof("/import_files")),
    ] {
        assert_eq!(send(path, &proof).await, unknown, "{path}");
    }
    // The key is checked before the body is read.
    let head = "POST /started/command:shell/import_files HTTP/1.1\r\nHost: localhost\r\n";
    let request = format!("{head}Content-Type: application/json\r\nContent-Length: 40000000\r\n\r\n");
    assert_eq!(rap_testkit::http::exchange(&rap.url, &request).await.status, 404);
    for path in ["/import_files", "/import_calls"] {
        assert_eq!(send(&format!("command:shell{path}"), &proof(path)).await.0, 403, "{path}");
    }
}
