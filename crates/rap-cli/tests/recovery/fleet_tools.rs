//! Tool servers that the nodes of a fleet start themselves.

use std::time::{Duration, Instant};

use rap_testkit::postgres::Server;
use rap_testkit::{Rap, Setup, until};
use serde_json::json;

use crate::fleet::until_nodes;
use crate::support::{Api, prepared};

/// A server in plain Python. Its tool `whoami` answers with its process id, `hold` after three seconds. It knows the
/// status of its own calls only, and says on stderr which calls were cancelled.
const SERVER: &str = r#"
import json, os, sys, threading, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

calls = set()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments): pass
    def answer(self, body):
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        tools = [{"name": name, "description": "", "inputSchema": {"type": "object"}} for name in ("whoami", "hold")]
        self.answer(json.dumps({"name": "who", "endpoint": f"http://127.0.0.1:{port}/invoke", "version": "1", "tools": tools}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tool_call_status":
            return self.answer(json.dumps({"alive": body["tool_call_id"] in calls}).encode())
        if self.path == "/invoke":
            calls.add(body["id"])
            threading.Thread(target=self.deliver, args=(body,)).start()
        if self.path == "/cancel_tool_call" and body["tool_call_id"] in calls:
            print("cancelled a call of", os.getpid(), file=sys.stderr, flush=True)
        self.answer(b"")
    def deliver(self, call):
        if call["operation"] == "hold":
            time.sleep(3)
        result = {"type": "tool_result", "id": call["id"], "group_id": call["group_id"], "text": f"pid {os.getpid()}"}
        urllib.request.urlopen(urllib.request.Request(call["callback_url"], json.dumps(result).encode(), {"content-type": "application/json"}))

server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
port = server.server_address[1]
print(json.dumps({"port": port}), flush=True)
server.serve_forever()
"#;

fn node(url: &str, lease: &str) -> Setup {
    let key = "7e".repeat(32);
    let setup = Setup::new().store(&format!("url = {url:?}\nkey = {key:?}\nlease = {lease:?}"));
    // Calls are checked often, and lost if the process that is asked does not know them.
    let setup = setup.limit("lost_after = \"500ms\"");
    setup.tool_lines(&format!("name = \"who\"\ncommand = [\"python3\", \"-c\", {}]", json!(SERVER)))
}

/// Starts two nodes, of which the first one is the host. Callbacks go to the second one.
async fn two(url: &str, lease: &str) -> [(Rap, Api); 2] {
    let mut other = prepared(node(url, lease));
    let mut one = prepared(node(url, lease).server(&format!("public_url = {:?}", other.url)));
    one.start_again();
    other.start_again();
    let nodes = [one, other].map(|rap| {
        let api = Api::of(&rap);
        (rap, api)
    });
    until_nodes(&nodes[0].1, 2).await;
    nodes
}

/// Calls a tool in a thread. Returns its result.
async fn result(api: &Api, thread: &str, tool: &str) -> String {
    let before = api.texts(thread).await.len();
    api.say(thread, &format!("call {tool} {{}}")).await;
    until(&format!("the result of {tool}"), async || {
        let texts = api.texts(thread).await;
        texts.into_iter().skip(before).find(|text| text.starts_with("pid ") || text.starts_with("Error"))
    })
    .await
}

/// Waits until the process has the call of a thread.
async fn until_acknowledged(api: &Api, thread: &str) {
    until("the call is acknowledged", async || {
        let calls = api.raw_listing("calls").await;
        calls.iter().any(|call| call["thread_id"] == thread && !call["acknowledged_at"].is_null())
    })
    .await;
}

/// The process that a call reaches depends neither on the node that the message reached nor on the one that checks,
/// cancels or closes.
#[tokio::test(flavor = "multi_thread")]
async fn the_calls_of_a_started_tool_server_are_in_one_process_of_the_fleet() {
    let database = Server::shared().database();
    let [(one, first), (_other, second)] = two(&database.url(), "2s").await;
    first.create("a", "say hello").await;
    second.create("b", "say hello").await;
    for thread in ["a", "b"] {
        first.until_idle(thread).await;
    }
    let pid = result(&first, "a", "whoami").await;
    assert!(pid.starts_with("pid "), "{pid}");
    for (api, thread) in [(&second, "a"), (&second, "b"), (&first, "b")] {
        api.until_idle(thread).await;
        assert_eq!(result(api, thread, "whoami").await, pid);
    }
    // A call that takes long is checked several times, by the node that has it.
    second.until_idle("b").await;
    assert_eq!(result(&second, "b", "hold").await, pid);
    // A cancellation reaches its process, whichever node was asked for it.
    second.until_idle("b").await;
    second.say("b", "call hold {}").await;
    until_acknowledged(&second, "b").await;
    second.act("b", "interrupt").await.expect(202);
    one.until_logged(&format!("cancelled a call of {}", pid.strip_prefix("pid ").unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_node_takes_over_a_started_tool_server_of_a_node_that_is_gone() {
    let database = Server::shared().database();
    let [(mut one, _), (other, second)] = two(&database.url(), "2s").await;
    second.create("a", "say hello").await;
    second.until_idle("a").await;
    let pid = result(&second, "a", "whoami").await;
    second.until_idle("a").await;
    second.create("lost", "call hold {}").await;
    until_acknowledged(&second, "lost").await;
    one.kill();
    let killed = Instant::now();
    let next = result(&second, "a", "whoami").await;
    assert!(next.starts_with("pid ") && next != pid, "{next}");
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert!(other.log().contains("this node now owns these tool servers"), "{}", other.log());
    // The call that was in the process of the other node ends: sent again, or with an error.
    second.until_idle("lost").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_stopped_hands_its_started_tool_servers_over_at_once() {
    let database = Server::shared().database();
    // A lease that is long enough that nothing is taken over because it has run out.
    let [(mut one, _), (_other, second)] = two(&database.url(), "5m").await;
    second.create("a", "say hello").await;
    second.until_idle("a").await;
    let pid = result(&second, "a", "whoami").await;
    second.until_idle("a").await;
    one.stop();
    let next = result(&second, "a", "whoami").await;
    assert!(next.starts_with("pid ") && next != pid, "{next}");
}
