//! An MCP client that can do everything wrong: it writes lines and reads lines.

use std::process::Stdio as Pipe;

use rap_testkit::{PATIENCE, programs};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// `rap mcp serve` on pipes.
pub struct Stdio {
    child: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
    /// Messages that were read while the test waited for another one.
    waiting: Vec<Value>,
    ids: u64,
}

impl Stdio {
    /// Starts it for a tool server, with more flags.
    pub fn start(toolset: &str, flags: &[&str]) -> Stdio {
        Stdio::run(&[&["mcp", "serve", "--toolset", toolset], flags].concat())
    }

    /// Starts it with these arguments.
    pub fn run(arguments: &[&str]) -> Stdio {
        let mut command = Command::from(programs::rap(arguments));
        command.stdin(Pipe::piped()).stdout(Pipe::piped()).stderr(Pipe::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Stdio { input: child.stdin.take(), child, output, waiting: Vec::new(), ids: 0 }
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        let input = self.input.as_mut().unwrap();
        input.write_all(bytes).await.unwrap();
        input.flush().await.unwrap();
    }

    async fn line(&mut self, message: &Value) {
        self.write(format!("{message}\n").as_bytes()).await;
    }

    /// Sends a request. Returns its id.
    pub async fn send(&mut self, method: &str, params: Value) -> u64 {
        self.ids += 1;
        self.line(&json!({"jsonrpc": "2.0", "id": self.ids, "method": method, "params": params})).await;
        self.ids
    }

    pub async fn notify(&mut self, method: &str, params: Value) {
        self.line(&json!({"jsonrpc": "2.0", "method": method, "params": params})).await;
    }

    /// Answers a request of the server.
    pub async fn answer(&mut self, request: &Value, result: Value) {
        self.line(&json!({"jsonrpc": "2.0", "id": request["id"], "result": result})).await;
    }

    /// Waits for a message. Every line of stdout has to be one.
    pub async fn message(&mut self, is_it: impl Fn(&Value) -> bool) -> Value {
        if let Some(index) = self.waiting.iter().position(&is_it) {
            return self.waiting.remove(index);
        }
        loop {
            let Ok(line) = timeout(PATIENCE, self.output.next_line()).await else {
                panic!("the message did not come; instead: {:?}", self.waiting)
            };
            let Some(line) = line.unwrap() else { panic!("stdout was closed: {}", self.log().await) };
            let message: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("not JSON: {line}"));
            assert_eq!(message["jsonrpc"], "2.0", "{line}");
            if is_it(&message) {
                return message;
            }
            self.waiting.push(message);
        }
    }

    async fn log(&mut self) -> String {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).await.unwrap();
        log
    }

    /// Waits for the result of a request.
    pub async fn result(&mut self, id: u64) -> Value {
        let mut answer = self.message(|message| message["id"] == id && message.get("method").is_none()).await;
        assert!(answer.get("error").is_none(), "{answer}");
        answer["result"].take()
    }

    pub async fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        self.result(id).await
    }

    /// Sends a request that has to fail. Returns its error.
    pub async fn refusal(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        let mut answer = self.message(|message| message["id"] == id).await;
        assert!(answer["error"].is_object(), "{answer}");
        answer["error"].take()
    }

    /// Waits for a notification. Returns its parameters.
    pub async fn notification(&mut self, method: &str) -> Value {
        self.message(|message| message["method"] == method).await["params"].take()
    }

    /// Waits for a request of the server.
    pub async fn request(&mut self, method: &str) -> Value {
        self.message(|message| message["method"] == method && message.get("id").is_some()).await
    }

    /// Repeats a request until its result is the expected one.
    pub async fn until(&mut self, method: &str, params: &Value, is_it: impl Fn(&Value) -> bool) -> Value {
        let asking = async {
            loop {
                let result = self.ask(method, params.clone()).await;
                if is_it(&result) {
                    return result;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, asking).await.unwrap_or_else(|_| panic!("{method} never had the expected result"))
    }

    pub async fn initialize(&mut self, version: &str, capabilities: Value) -> Value {
        let client = json!({"name": "test", "version": "1"});
        let params = json!({"protocolVersion": version, "capabilities": capabilities, "clientInfo": client});
        let hello = self.ask("initialize", params).await;
        self.notify("notifications/initialized", json!({})).await;
        hello
    }

    /// Calls a tool. Returns the id of the request.
    pub async fn call(&mut self, name: &str, arguments: Value) -> u64 {
        self.send("tools/call", json!({"name": name, "arguments": arguments})).await
    }

    pub async fn tool_names(&mut self) -> Vec<String> {
        let listed = self.ask("tools/list", json!({})).await;
        let tools = listed["tools"].as_array().unwrap();
        tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Closes stdin and waits for the end of the process. Returns its exit code.
    pub async fn close(&mut self) -> Option<i32> {
        self.input = None;
        timeout(PATIENCE, self.child.wait()).await.expect("it did not exit").unwrap().code()
    }
}

/// Returns the first text of a result.
pub fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {result}"))
}
