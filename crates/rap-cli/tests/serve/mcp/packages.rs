//! Servers from the registries: the reference servers in TypeScript, and one made with the Python SDK.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rap_testkit::{Setup, python, until};
use serde_json::json;

use super::{Ending, call, results, server};

/// The packages, with exact versions.
const NODE: [&str; 3] = [
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
    "@modelcontextprotocol/server-memory@2026.8.31",
];
const PYTHON: &str = "mcp==2.3.0";

/// Installs the node packages the first time. Returns their directory.
fn node_modules() -> PathBuf {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mcp-servers-1");
    fs::create_dir_all(&home).unwrap();
    let lock = File::create(home.join("lock")).unwrap();
    lock.lock().unwrap();
    let complete = home.join("complete");
    if !complete.exists() {
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-fund", "--no-audit", "--prefix"]).arg(&home).args(NODE);
        python::run(&mut npm);
        File::create(complete).unwrap();
    }
    home.join("node_modules/@modelcontextprotocol")
}

fn node(name: &str, package: &str, arguments: &[&str]) -> String {
    let program = node_modules().join(package).join("dist/index.js");
    let mut command = vec!["node", program.to_str().unwrap()];
    command.extend(arguments);
    format!("name = {name:?}\ncommand = {}", json!(command))
}

#[tokio::test]
async fn the_reference_servers_work() {
    let files = tempfile::tempdir().unwrap();
    let root = files.path().canonicalize().unwrap();
    let rap = Setup::new()
        .mcp_lines(&node("everything", "server-everything", &["stdio"]))
        .mcp_lines(&node("files", "server-filesystem", &[root.to_str().unwrap()]))
        .mcp_lines(&format!("{}\nprefix = \"mem_\"", node("memory", "server-memory", &[])))
        .start();
    for url in ["mcp:everything", "mcp:files", "mcp:memory"] {
        let listed = server(&rap, url).await;
        assert_eq!(listed["errors"], json!([]), "{listed}");
    }
    let thread = rap.open("hello").await;
    rap.until_idle(&thread).await;
    assert_eq!(call(&rap, &thread, "get-sum", json!({"a": 2, "b": 3})).await, "The sum of 2 and 3 is 5.");
    let image = call(&rap, &thread, "get-tiny-image", json!({})).await;
    assert!(image.contains("image/png"), "{image}");
    let slow = json!({"duration": 1, "steps": 2});
    let slow = call(&rap, &thread, "trigger-long-running-operation", slow).await;
    assert!(slow.contains("Long running operation completed"), "{slow}");
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200).to_string();
    assert!(views.contains("progress"), "{views}");

    let path = root.join("note.txt").to_str().unwrap().to_owned();
    let written = call(&rap, &thread, "read_text_file", json!({"path": path})).await;
    assert!(written.starts_with("Error: "), "{written}");
    fs::write(&path, "kept").unwrap();
    assert_eq!(call(&rap, &thread, "read_text_file", json!({"path": path})).await, "kept");

    let entity =
        json!({"entities": [{"name": "Ann", "entityType": "person", "observations": ["likes tea"]}]});
    call(&rap, &thread, "mem_create_entities", entity).await;
    let graph = call(&rap, &thread, "mem_read_graph", json!({})).await;
    assert!(graph.contains("likes tea"), "{graph}");
}

/// It answers 400 for a session that it does not know, and its streams can be resumed.
#[tokio::test]
async fn the_reference_server_works_over_http_also_after_it_was_started_again() {
    let port = rap_testkit::Port::reserve();
    let program = node_modules().join("server-everything/dist/index.js");
    let start = async || {
        let mut command = Command::new("node");
        command.arg(&program).arg("streamableHttp").env("PORT", port.number().to_string());
        let server = Ending(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        until("the server", async || tokio::net::TcpStream::connect(port.address()).await.is_ok()).await;
        server
    };
    let running = start().await;
    let url = format!("http://{}/mcp", port.address());
    let rap = Setup::new().mcp_lines(&format!("name = \"everything\"\nurl = {url:?}")).start();
    server(&rap, "mcp:everything").await;
    let thread = rap.open("hello").await;
    rap.until_idle(&thread).await;
    assert_eq!(call(&rap, &thread, "get-sum", json!({"a": 2, "b": 3})).await, "The sum of 2 and 3 is 5.");
    let slow = json!({"duration": 600, "steps": 600});
    let other = rap.open(&format!("call trigger-long-running-operation {slow}")).await;
    rap.until_status(&other, "waiting").await;
    until("progress", async || {
        rap.get(&format!("/v1/threads/{other}/views")).await.expect(200).to_string().contains("progress")
    })
    .await;
    drop(running);
    let _running = start().await;
    assert_eq!(call(&rap, &thread, "get-sum", json!({"a": 2, "b": 3})).await, "The sum of 2 and 3 is 5.");
    let lost = until("the lost call", async || results(&rap, &other).await.first().cloned()).await;
    assert!(lost.starts_with("Error: the MCP server everything ended while this call was running"), "{lost}");
}

/// A server with the Python SDK.
const SDK_SERVER: &str = r#"
import sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("sdk")

@server.tool()
async def add(a: int, b: int, context: Context) -> int:
    """Adds two numbers."""
    await context.report_progress(1, 2, "adding")
    return a + b

@server.tool()
def refuse() -> str:
    raise ValueError("never")

@server.resource("config://app")
def config() -> str:
    return "debug = true"

@server.prompt()
def review(code: str) -> str:
    return f"Review {code}"

server.run(sys.argv[1], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
"#;

fn sdk() -> PathBuf {
    python::environment(env!("CARGO_TARGET_TMPDIR"), "mcp-sdk-1", &[PYTHON]).join("bin/python")
}

async fn use_sdk_server(setup: Setup) {
    let rap = setup.start();
    server(&rap, "mcp:sdk").await;
    let thread = rap.open("hello").await;
    rap.until_idle(&thread).await;
    assert_eq!(call(&rap, &thread, "add", json!({"a": 40, "b": 2})).await, "42");
    let refused = call(&rap, &thread, "refuse", json!({})).await;
    assert!(refused.starts_with("Error: Error executing tool refuse"), "{refused}");
    let config = call(&rap, &thread, "read_resource", json!({"uri": "config://app"})).await;
    assert!(config.contains("debug = true"), "{config}");
    let prompt =
        call(&rap, &thread, "get_prompt", json!({"name": "review", "arguments": {"code": "x"}})).await;
    assert!(prompt.contains("Review x"), "{prompt}");
}

#[tokio::test]
async fn a_server_of_the_python_sdk_works_over_stdio() {
    let command = json!([sdk().to_str().unwrap(), "-c", SDK_SERVER, "stdio"]);
    use_sdk_server(Setup::new().mcp_lines(&format!("name = \"sdk\"\ncommand = {command}"))).await;
}

#[tokio::test]
async fn a_server_of_the_python_sdk_works_over_http() {
    let port = rap_testkit::Port::reserve();
    let number = port.address().rsplit(':').next().unwrap().to_owned();
    let mut command = Command::new(sdk());
    command.args(["-c", SDK_SERVER, "streamable-http", &number]);
    let _server = Ending(command.spawn().unwrap());
    let url = format!("http://127.0.0.1:{number}/mcp");
    use_sdk_server(Setup::new().mcp_lines(&format!("name = \"sdk\"\nurl = {url:?}"))).await;
}
