//! Tool servers that `rap serve` starts.

use std::fs;
use std::process::Command;

use rap_testkit::marked::{mark, until_marked};
use rap_testkit::{Port, Rap, Setup, Tools, programs, until};
use serde_json::{Value, json};

/// A server in plain Python, whose tool `whoami` answers with its process id.
const SERVER: &str = r#"
import json, os, sys, threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments): pass
    def answer(self, body):
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        tool = {"name": "whoami", "description": "", "inputSchema": {"type": "object"}}
        self.answer(json.dumps({"name": "who", "endpoint": f"http://127.0.0.1:{port}/invoke", "version": "1", "tools": [tool]}).encode())
    def do_POST(self):
        call = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(b"")
        if self.path == "/invoke":
            threading.Thread(target=self.deliver, args=(call,)).start()
    def deliver(self, call):
        secret = ",".join(name for name in os.environ if "SECRET" in name or name == "RAP_TOKEN")
        result = {"type": "tool_result", "id": call["id"], "group_id": call["group_id"], "text": f"pid {os.getpid()} secrets [{secret}]"}
        request = urllib.request.Request(call["callback_url"], json.dumps(result).encode(), {"content-type": "application/json"})
        urllib.request.urlopen(request)

server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
port = server.server_address[1]
assert os.environ["RAP_EMBEDDED"] == "1"
print(json.dumps({"port": port}), flush=True)
print("up and running", file=sys.stderr, flush=True)
server.serve_forever()
"#;

fn python(name: &str, source: &str) -> String {
    format!("name = {name:?}\ncommand = [\"python3\", \"-c\", {}]", json!(source))
}

/// Calls `whoami` and returns the process id.
async fn whoami(rap: &Rap, thread: &str) -> u32 {
    let before = rap.history(thread).await.len();
    rap.say(thread, "call whoami {}").await;
    let text = until("the answer of whoami", async || {
        let history = rap.history(thread).await;
        history
            .iter()
            .skip(before)
            .find(|entry| entry["kind"] == "result")
            .map(|entry| entry["content"].to_string())
    })
    .await;
    assert!(text.contains("secrets []"), "{text}");
    text.split(' ').nth(1).and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

async fn tool_server(rap: &Rap, url: &str) -> Value {
    let servers = rap.get("/v1/tools").await.expect(200)["servers"].clone();
    let found = servers.as_array().unwrap().iter().find(|server| server["url"] == url).cloned();
    found.unwrap_or_else(|| panic!("{servers}"))
}

#[tokio::test]
async fn a_session_goes_on_after_its_server_got_another_port_and_after_a_restart() {
    let setup = Setup::new().tool_lines(&python("who", SERVER)).token("env:MY_SECRET");
    let rap = setup.variable("MY_SECRET", "env:MY_SECRET").variable("RAP_TOKEN", "x").start();
    let thread = rap.open("hello").await;
    rap.until_idle(&thread).await;
    let first = whoami(&rap, &thread).await;
    assert!(rap.log().contains("up and running"), "{}", rap.log());
    assert!(rap.log().contains("server=\"who\""), "{}", rap.log());

    Command::new("kill").args(["-9", &first.to_string()]).status().unwrap();
    let second = whoami(&rap, &thread).await;
    assert_ne!(first, second);

    let rap = rap.restarted();
    let third = whoami(&rap, &thread).await;
    assert!(third != first && third != second);
    let toolset = tool_server(&rap, "command:who").await;
    assert_eq!((&toolset["name"], &toolset["errors"]), (&json!("who"), &json!([])));
}

#[tokio::test]
async fn a_server_that_cannot_be_started_is_an_error_of_its_own() {
    let good = Tools::start().await;
    let rap = Setup::new()
        .tools(&good)
        .tool_lines("name = \"missing\"\ncommand = [\"/no/such/program\", \"--token=hidden\"]")
        .tool_lines(&python("ends", "raise SystemExit(7)"))
        .tool_lines(&python("talks", "print('hello', flush=True)\nimport time\ntime.sleep(1000)"))
        .tool_lines("command = [\"/no/such/program\", \"--token=hidden\"]")
        .start();
    for (name, expected) in [
        ("missing", "missing cannot be started: No such file or directory"),
        ("ends", "ends ended before it named its port: exit code 7"),
        ("talks", "talks must name its port in the first line on stdout, as {\"port\": N}, not \"hello\""),
    ] {
        until(expected, async || {
            let server = tool_server(&rap, &format!("command:{name}")).await;
            server["errors"][0].as_str().is_some_and(|error| error.starts_with(expected))
        })
        .await;
    }
    let listed = rap.get("/v1/tools").await.expect(200).to_string();
    assert!(listed.contains("command:program-") && !listed.contains("hidden"), "{listed}");
    assert!(!rap.log().contains("hidden"), "{}", rap.log());
    let thread = rap.open("call work {}").await;
    good.invocation().await.returns("worked").await;
    rap.until_line(&thread, "assistant: work: worked").await;
}

#[tokio::test]
async fn a_server_that_does_not_name_its_port_in_time_is_ended_and_started_again() {
    let (mark, notes) = (mark(), tempfile::tempdir().unwrap());
    let starts = notes.path().join("starts");
    // It leaves a process in a session of its own, which has to end too.
    let source = format!(
        "import subprocess, time\nopen({starts:?}, 'a').write('.')\nsubprocess.Popen(['setsid', 'sleep', '{mark}'])\n\
         time.sleep(1000)"
    );
    let server = format!("{}\nstart_timeout = \"1s\"", python("silent", &source));
    let rap = Setup::new().tool_lines(&server).start();
    until("the error", async || {
        let server = tool_server(&rap, "command:silent").await;
        server["errors"][0] == "silent did not name its port within 1s"
    })
    .await;
    until("the second start", async || fs::read(&starts).unwrap_or_default().len() >= 2).await;
    // The one of the first start has ended.
    until_marked(&mark, 1).await;
    assert!(rap.log().contains("silent did not name its port within 1s"), "{}", rap.log());
    drop(rap);
    until_marked(&mark, 0).await;
}

#[tokio::test]
async fn a_server_ends_with_the_runtime_however_that_ends() {
    let mark = mark();
    let source = SERVER.replace(
        "server = Threading",
        &format!(
            "import subprocess; subprocess.Popen([\"setsid\", \"sleep\", \"{mark}\"])\nserver = Threading"
        ),
    );
    let mut rap = Setup::new().tool_lines(&python("who", &source)).start();
    until_marked(&mark, 1).await;
    rap.stop();
    until_marked(&mark, 0).await;
    rap.start_again();
    until_marked(&mark, 1).await;
    rap.kill();
    until_marked(&mark, 0).await;
}

#[tokio::test]
async fn a_rap_tool_server_can_be_started_and_has_a_token_that_stays() {
    let sink = programs::example_path("kitchen_sink");
    let rap = Setup::new().tool_lines(&format!("name = \"sink\"\ncommand = [{sink:?}]")).start();
    let thread = rap.open("call echo {\"text\": \"hi\"}").await;
    rap.until_line(&thread, "assistant: echo: echo hi").await;
    let token = fs::read_to_string(rap.directory().join("rap-data/sink/token")).unwrap();
    assert!(token.len() >= 32);
    let log = rap.log();
    let port = log.split("port=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    let stranger = rap_testkit::Client::new(&format!("http://127.0.0.1:{port}"), None);
    let refused = stranger.post("/close_thread", &json!({"thread_id": thread})).await;
    assert_eq!(refused.status, 401);

    // The question is answered after the server got another port.
    rap.say(&thread, "call choose {}").await;
    rap.until_status(&thread, "needs_you").await;
    let mut rap = rap.restarted();
    rap.until_status(&thread, "needs_you").await;
    let question = rap.listing("inbox").await.remove(0);
    let path = format!("/v1/threads/{thread}/calls/{}/choice", question["call_id"].as_str().unwrap());
    rap.post(&path, &json!({"selected": 2})).await.expect(202);
    rap.until_line(&thread, "assistant: choose: chose blue").await;
    assert_eq!(fs::read_to_string(rap.directory().join("rap-data/sink/token")).unwrap(), token);
    rap.stop();
}

#[tokio::test]
async fn the_start_says_which_servers_do_not_answer_and_waits_for_none() {
    let (good, port) = (Tools::start().await, Port::reserve());
    let dead = format!("http://{}", port.address());
    let rap = Setup::new().tools(&good).tool_server(&dead).start();
    rap.until_logged("the tool server does not answer").await;
    let log = rap.log();
    let line = log.lines().find(|line| line.contains("does not answer")).unwrap();
    assert!(line.contains(&port.address()), "{line}");
    assert_eq!(log.matches("does not answer").count(), 1, "{log}");
}

#[test]
fn a_tool_server_has_exactly_one_source() {
    let directory = tempfile::tempdir().unwrap();
    let serve = |lines: &str| {
        fs::write(directory.path().join("rap.toml"), format!("[[tool_server]]\n{lines}\n")).unwrap();
        let output = programs::rap(&["serve"]).current_dir(directory.path()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (lines, expected) in [
        (
            "name = \"x\"",
            "tool_server.url: missing; every tool server needs a URL, or command or run to start it",
        ),
        ("run = \"shell\"\nurl = \"http://h\"", "tool_server.run: expected only one of url, command and run"),
        (
            "run = \"bash\"",
            "tool_server.run: expected \"shell\", \"files\", \"http\", \"timer\" or \"webhook\"",
        ),
        ("command = []", "tool_server.command: expected an array of the program and its arguments"),
        ("run = \"http\"\nroots = [\"/srv\"]", "tool_server.roots: unknown key"),
        ("command = [\"x\"]\nname = \"../x\"", "tool_server.name: expected 1 to 64 letters"),
    ] {
        let (code, text) = serve(lines);
        assert!(code == Some(1) && text.contains(expected), "{lines}: {text}");
    }
}
