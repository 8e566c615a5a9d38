//! `rap mcp serve` with clients of other people, which are installed from PyPI and npm the first time: the Python and
//! TypeScript SDKs in both of their generations, the inspector, and the official conformance suite.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rap_testkit::{node, programs, python};
use rap_tool::prelude::*;
use rap_tool::{Content, Image};
use serde_json::Value;
use tempfile::TempDir;

use super::http::Server;
use crate::support::serve_in_thread;

const PYTHON_1: &str = "mcp==1.30.0";
const PYTHON_2: &str = "mcp==2.3.0";
/// Scenarios of the conformance suite about what RAP tools can do. The others need prompts, sampling, logging, completion,
/// audio, embedded resources, resources with given names, or `$schema`, which rap-tool leaves out.
const SCENARIOS: [&str; 12] = [
    "server-initialize",
    "ping",
    "tools-list",
    "tools-call-simple-text",
    "tools-call-image",
    "tools-call-error",
    "tools-call-with-progress",
    "tools-call-elicitation",
    "server-sse-multiple-streams",
    "server-sse-polling",
    "resources-list",
    "dns-rebinding-protection",
];
/// A PNG of one pixel.
const PIXEL: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

/// Does nothing.
#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// Repeats a text.
#[derive(Deserialize, JsonSchema)]
struct Echo {
    text: String,
}

/// Sleeps for some seconds.
#[derive(Deserialize, JsonSchema)]
struct Slow {
    seconds: f64,
}

/// Asks for a colour.
#[derive(Deserialize, JsonSchema)]
struct Ask {
    message: Option<String>,
}

async fn progress(_: Nothing, call: Call) -> Result<&'static str> {
    for (fraction, text) in [(0.0, "begin"), (0.5, "half"), (1.0, "done")] {
        call.progress(fraction, text).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok("made progress")
}

async fn slow(args: Slow, call: Call) -> Result<String> {
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(args.seconds)) => Ok(format!("slept {}", args.seconds)),
        () = call.cancelled() => Err(Error::new("stopped early")),
    }
}

async fn choose(args: Ask, call: Call) -> Result<String> {
    let colours = ["red", "green", "blue"];
    let chosen = call.choose(args.message.unwrap_or("Which colour?".into()), colours, 1).await?;
    Ok(format!("chose {}", colours[chosen]))
}

async fn tick(_: Nothing, subscribe: Subscribe) -> Result<()> {
    let subscription = subscribe.confirm("Ticking.").await?;
    for number in 1..=100 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        subscription.send(Event::new(format!("tick {number}"))).await?;
    }
    subscription.finish("the end").await
}

async fn picture(_: Nothing, _: Call) -> Result<Vec<Content>> {
    let image = Image { data: PIXEL.into(), media_type: "image/png".into() };
    Ok(vec![Content::Text { text: "a pixel".into() }, Content::Image(image)])
}

/// Runs a tool server with one tool of each kind, under the names that the conformance suite uses where it has any.
fn tool_server() -> &'static str {
    static URL: OnceLock<(String, TempDir)> = OnceLock::new();
    let (url, _) = URL.get_or_init(|| {
        let data = tempfile::tempdir().unwrap();
        let server = ToolServer::new("sink")
            .tool("echo", |args: Echo, _: Call| async move { Ok(format!("echo {}", args.text)) })
            .tool("test_simple_text", |_: Nothing, _: Call| async { Ok("a text") })
            .tool("test_error_handling", |_: Nothing, _: Call| async {
                Err::<String, _>(Error::new("on purpose"))
            })
            .tool("test_image_content", picture)
            .tool("test_tool_with_progress", progress)
            .tool("test_elicitation", choose)
            .tool("slow", slow)
            .subscription("tick", tick)
            .data(data.path());
        (serve_in_thread(server), data)
    });
    url
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/commands/mcp_serve").join(name)
}

/// Runs a counterpart with the command line of a server on stdio, and with the URL of one.
fn over_both_transports(counterpart: impl Fn() -> Command) {
    let rap = programs::rap_path();
    python::run(counterpart().arg("stdio").arg(&rap).args(["mcp", "serve", "--toolset", tool_server()]));
    let server = Server::start(tool_server(), &[]);
    python::run(counterpart().args(["http", &server.url]));
}

fn npm() -> PathBuf {
    node::mcp_packages(env!("CARGO_TARGET_TMPDIR"))
}

/// Runs a script with the packages. A script finds them beside itself only, so it is copied there.
fn node_script(name: &str) -> Command {
    let home = npm();
    let copy = home.join(format!("{}-{name}", std::process::id()));
    std::fs::copy(script(name), &copy).unwrap();
    let mut command = Command::new(node::program(&home, "node"));
    command.arg(copy).current_dir(&home);
    command
}

#[test]
fn the_python_client_of_the_first_generation_works() {
    let home = python::environment(env!("CARGO_TARGET_TMPDIR"), "mcp-client-1", &[PYTHON_1]);
    over_both_transports(|| {
        let mut command = Command::new(home.join("bin/python"));
        command.arg(script("client_v1.py"));
        command
    });
}

#[test]
fn the_python_client_of_the_second_generation_works_with_and_without_handshake() {
    let home = python::environment(env!("CARGO_TARGET_TMPDIR"), "mcp-client-2", &[PYTHON_2]);
    for mode in ["legacy", "2026-07-28"] {
        over_both_transports(|| {
            let mut command = Command::new(home.join("bin/python"));
            command.arg(script("client_v2.py")).arg(mode);
            command
        });
    }
}

#[test]
fn the_typescript_client_of_the_first_generation_works() {
    over_both_transports(|| node_script("client_v1.mjs"));
}

#[test]
fn the_typescript_client_of_the_second_generation_works_with_and_without_handshake() {
    for mode in ["legacy", "2026-07-28"] {
        over_both_transports(|| {
            let mut command = node_script("client_v2.mjs");
            command.arg(mode);
            command
        });
    }
}

#[test]
fn the_command_line_of_the_inspector_lists_and_calls_tools() {
    let home = npm();
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(tool_server(), &[]);
    let rap = programs::rap_path();
    let rap = rap.to_str().unwrap();
    let stdio = [rap, "mcp", "serve", "--toolset", tool_server()];
    for target in [&stdio[..], &[server.url.as_str()]] {
        let inspect = |arguments: &[&str]| -> Value {
            let mut command = Command::new(node::program(&home, "node"));
            command.arg(node::program(&home, "mcp-inspector")).arg("--cli");
            // It keeps files in the home directory.
            command.env("HOME", directory.path()).current_dir(directory.path());
            let output = command.args(arguments).arg("--").args(target).output().unwrap();
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{out}{err}");
            serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
        };
        let listed = inspect(&["--method", "tools/list"]).to_string();
        assert!(listed.contains("\"test_simple_text\""), "{listed}");
        let called = inspect(&["--method", "tools/call", "--tool-name", "echo", "--tool-arg", "text=hi"]);
        assert!(called.to_string().contains("echo hi"), "{called}");
    }
}

#[test]
fn the_conformance_suite_passes_where_it_applies() {
    let home = npm();
    let results = tempfile::tempdir().unwrap();
    let server = Server::start(tool_server(), &[]);
    let url = server.url.replace("127.0.0.1", "localhost");
    for scenario in SCENARIOS {
        let mut command = Command::new(node::program(&home, "node"));
        command.arg(node::program(&home, "conformance")).args([
            "server",
            "--url",
            &url,
            "--scenario",
            scenario,
        ]);
        python::run(command.current_dir(results.path()));
    }
}
