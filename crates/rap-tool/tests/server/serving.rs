//! Binding, environment variables, shutdown, and the examples.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{Caller, Gate, Journal, Runtime, Server, ToolProcess, data_dir, short_pauses};
use rap_protocol::parse_toolset;
use rap_testkit::http::exchange;
use rap_testkit::programs::example;
use rap_testkit::{Port, Process, until};
use rap_tool::prelude::*;
use rap_tool::{Bound, ServeError, UrlPolicy};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

#[derive(Deserialize, JsonSchema)]
struct Echo {
    text: String,
}

async fn echo(args: Echo, _: Call) -> Result<String> {
    Ok(format!("echo {}", args.text))
}

fn server(data: &Path) -> ToolServer {
    ToolServer::new("test").limits(short_pauses()).data(data).tool("echo", echo)
}

/// Returns the error of a server that does not start on this address.
async fn bind_error(server: ToolServer, address: &str) -> ServeError {
    server.bind(address).await.map(|bound: Bound| bound.local_addr()).unwrap_err()
}

async fn discover(url: &str) -> Value {
    let get = "GET /.well-known/rap-toolset HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let answer = exchange(url, get).await;
    assert_eq!(answer.status, 200);
    parse_toolset(answer.text.as_bytes()).unwrap();
    answer.body
}

async fn check_call(caller: &Caller, runtime: &mut Runtime, id: &str) {
    caller.accepted(&runtime.invocation("echo", "t", id, json!({"text": id}))).await;
    assert_eq!(runtime.next().await.text(), format!("echo {id}"));
}

/// Proves: TR-19
#[tokio::test]
async fn a_server_without_a_token_binds_only_to_loopback() {
    let data = data_dir();
    let journal = data.path().join("journal");
    for with_url in [false, true] {
        let mut tools = server(&journal);
        if with_url {
            tools = tools.public_url("https://tools.example");
        }
        let error = bind_error(tools, "0.0.0.0:0").await;
        assert!(matches!(error, ServeError::UnauthenticatedListener(_)), "{error}");
        for way_out in ["RAP_TOOL_BEARER", ".bearer(token)", "Auth::OpenToAnyone"] {
            assert!(error.to_string().contains(way_out), "{error}");
        }
    }
    assert!(!journal.exists(), "nothing was begun");
}

#[tokio::test]
async fn open_to_anyone_allows_other_addresses() {
    let data = data_dir();
    let tools = server(data.path())
        .auth(Auth::OpenToAnyone)
        .public_url("https://tools.example/here/")
        .callbacks_to(UrlPolicy::Loopback);
    let bound = tools.bind("0.0.0.0:0").await.unwrap();
    assert_eq!(bound.url(), "https://tools.example/here");
    let address = format!("http://127.0.0.1:{}", bound.local_addr().port());
    tokio::spawn(bound.run_until(std::future::pending()));
    assert_eq!(discover(&address).await["endpoint"], "https://tools.example/here/invoke");
    check_call(&Caller::new(&address), &mut Runtime::start().await, "c").await;
}

#[tokio::test]
async fn a_url_is_no_directory_for_the_journal() {
    let url = std::path::Path::new("postgres://user:s3cr3t@127.0.0.1/journal");
    let error = bind_error(server(url), "127.0.0.1:0").await;
    assert!(matches!(error, ServeError::JournalUrl) && !error.to_string().contains("s3cr3t"), "{error}");
    assert!(!std::path::Path::new("postgres:").exists());
}

#[tokio::test]
async fn an_unspecified_address_needs_a_public_url() {
    let data = data_dir();
    for tools in [server(data.path()).bearer("t"), server(data.path()).auth(Auth::OpenToAnyone)] {
        let error = bind_error(tools, "0.0.0.0:0").await;
        assert!(matches!(error, ServeError::NoPublicUrl(_)), "{error}");
        assert!(error.to_string().contains("RAP_TOOL_URL"), "{error}");
    }
    let bad = [
        "",
        "tools.example",
        "ftp://tools.example",
        "https://",
        "https://h/?q=1",
        "https://h/#f",
        "https://h /",
    ];
    for url in bad {
        let error = bind_error(server(data.path()).public_url(url), "127.0.0.1:0").await;
        assert!(matches!(error, ServeError::BadPublicUrl), "{url:?}: {error}");
    }
    let bound = server(data.path()).bearer("t").public_url("https://h").bind("0.0.0.0:0").await.unwrap();
    assert_eq!(bound.url(), "https://h");
}

#[tokio::test]
async fn a_token_that_is_not_valid_in_a_header_is_refused() {
    let data = data_dir();
    for token in ["", " ", "two words", "tab\t", "é", "line\n"] {
        let error = bind_error(server(data.path()).bearer(token), "127.0.0.1:0").await;
        assert!(matches!(error, ServeError::BadToken), "{token:?}: {error}");
    }
}

#[tokio::test]
async fn an_invalid_toolset_is_refused() {
    let data = data_dir();
    let base = || ToolServer::new("test").data(data.path());
    let long = "x".repeat(129);
    let table = [
        (base(), "tools"),
        (base().tool("a", echo).tool("b", echo).tool("a", echo), "\"a\""),
        (base().tool("", echo), "a tool's name has 1 to 128 letters"),
        (base().tool("with space", echo), "tool \"with space\""),
        (base().tool("../../etc", echo), "tool \"../../etc\""),
        (base().tool(&long, echo), "a tool's name has 1 to 128 letters"),
        (ToolServer::new("").data(data.path()).tool("a", echo), "name"),
        (ToolServer::new(&long).data(data.path()).tool("a", echo), "name"),
        (base().tool("number", |_: u32, _: Call| async { Ok("") }), "a struct with named fields"),
    ];
    for (tools, named) in table {
        let error = bind_error(tools, "127.0.0.1:0").await;
        assert!(matches!(error, ServeError::Toolset(_)), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("the toolset is not valid: ") && text.contains(named), "{named}: {text}");
    }
    assert!(!data.path().join("journal.db").exists(), "nothing was begun");
}

#[tokio::test]
async fn an_unusable_data_directory_is_an_error_that_names_it() {
    let data = data_dir();
    let file = data.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = bind_error(server(&file.join("journal")), "127.0.0.1:0").await;
    assert!(matches!(error, ServeError::Data { .. }), "{error}");
    assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
    // A directory that exists and cannot be written, even by root.
    let error = bind_error(server(Path::new("/proc/self")), "127.0.0.1:0").await;
    assert!(error.to_string().contains("/proc/self"), "{error}");

    let garbage = data.path().join("garbage");
    std::fs::create_dir(&garbage).unwrap();
    std::fs::write(garbage.join("journal.db"), "this is not a database; it only contains text.".repeat(100))
        .unwrap();
    let error = bind_error(server(&garbage), "127.0.0.1:0").await;
    assert!(matches!(error, ServeError::Journal(_)), "{error}");
}

#[tokio::test]
async fn a_journal_can_be_used_by_one_server_with_one_key() {
    let data = data_dir();
    let running = Server::start(server(data.path()), data.path()).await;
    let error = bind_error(server(data.path()), "127.0.0.1:0").await;
    assert!(matches!(error, ServeError::Locked(_)), "{error}");
    assert!(error.to_string().contains("another process is using this directory"), "{error}");
    running.stop().await;

    let error = bind_error(server(data.path()).key("ab".repeat(32)), "127.0.0.1:0").await;
    assert!(matches!(error, ServeError::WrongKey(_)), "{error}");
    let error = bind_error(server(data.path()).key("short"), "127.0.0.1:0").await;
    assert!(matches!(error, ServeError::BadKey), "{error}");
    assert!(!error.to_string().contains("short"), "{error}");
    server(data.path()).bind("127.0.0.1:0").await.map(|bound| bound.local_addr()).unwrap();
}

#[tokio::test]
async fn an_invalid_or_used_address_is_an_error_that_names_it() {
    let data = data_dir();
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for address in [address.as_str(), "127.0.0.1", "nowhere", "127.0.0.1:99999"] {
        let error = bind_error(server(data.path()), address).await;
        assert!(matches!(error, ServeError::Bind { .. }), "{error}");
        assert!(error.to_string().contains(address), "{error}");
    }
}

/// A connection is refused until both endpoints work, even after a crash that left work in the journal.
///
/// Proves: LC-04
#[tokio::test]
async fn the_first_connection_after_a_start_is_served_on_both_endpoints() {
    let (data, port) = (data_dir(), Port::reserve());
    let (url, number) = (format!("http://{}", port.address()), port.number().to_string());
    let mut runtime = Runtime::start().await;
    for start in ["first", "second"] {
        let command = example("kitchen_sink", data.path(), &[("PORT", &number)]);
        let starting = tokio::task::spawn_blocking(|| Process::start(command));
        while TcpStream::connect(port.address()).await.is_err() {
            tokio::task::yield_now().await;
        }
        let caller = Caller::new(&url);
        let call = runtime.invocation("echo", "t", start, json!({"text": start}));
        let (invoked, _) = tokio::join!(caller.invoke(&call), discover(&url));
        assert_eq!(invoked.0, 200);
        assert_eq!(runtime.next().await.text(), format!("echo {start}"));
        caller
            .accepted(&runtime.invocation("slow", "t", &format!("open-{start}"), json!({"seconds": 1e6})))
            .await;
        starting.await.unwrap().kill();
    }
}

/// Proves: TR-19
#[tokio::test]
async fn a_token_from_the_environment_is_required() {
    let data = data_dir();
    let process = ToolProcess::start("kitchen_sink", data.path(), &[("RAP_TOOL_BEARER", "from-outside")]);
    let mut runtime = Runtime::start().await;
    discover(&process.url).await;
    let call = runtime.invocation("echo", "t", "c", json!({"text": "x"}));
    assert_eq!(process.caller().invoke(&call).await.0, 401);
    assert_eq!(process.caller().with_token("other").invoke(&call).await.0, 401);
    check_call(&process.caller().with_token("from-outside"), &mut runtime, "c").await;
    assert!(!process.log().contains("from-outside"), "a token is not logged");
}

#[tokio::test]
async fn port_and_url_from_the_environment_are_used() {
    let (data, port) = (data_dir(), Port::reserve());
    let environment = [("PORT", &*port.number().to_string()), ("RAP_TOOL_URL", "https://tools.example/sink")];
    let process = ToolProcess::start("kitchen_sink", data.path(), &environment);
    assert_eq!(process.url, "https://tools.example/sink");
    let address = format!("http://{}", port.address());
    assert_eq!(discover(&address).await["endpoint"], "https://tools.example/sink/invoke");
    check_call(&Caller::new(&address), &mut Runtime::start().await, "c").await;
    process.kill();

    for port in ["x", "-1", "65536", "80 80"] {
        let mut command = example("kitchen_sink", data.path(), &[]);
        command.env("PORT", port);
        let start_error = Process::refused(command);
        assert!(start_error.contains("PORT must be a number from 0 to 65535"), "{start_error}");
    }
    let mut command = example("kitchen_sink", data.path(), &[]);
    command.env("RAP_TOOL_URL", "no url");
    assert!(Process::refused(command).contains("the public URL must be"));
}

/// Proves: LC-34
#[tokio::test]
async fn the_data_directory_from_the_environment_is_used_and_private() {
    let data = data_dir();
    let directory = data.path().join("deep/down");
    let process = ToolProcess::start("kitchen_sink", &directory, &[]);
    let mut runtime = Runtime::start().await;
    check_call(&process.caller(), &mut runtime, "c").await;
    assert_eq!(Journal::open(&directory).rows()[0], 1);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    let files = ["journal.key", "journal.lock", "journal.db", "journal.db-wal", "journal.db-shm"];
    for name in files {
        assert_eq!(mode(&directory.join(name)), 0o600, "{name}");
    }
    process.kill();

    let expose =
        |name| std::fs::set_permissions(directory.join(name), PermissionsExt::from_mode(0o644)).unwrap();
    files[1..].iter().for_each(expose);
    let process = ToolProcess::start("kitchen_sink", &directory, &[]);
    let paths: Vec<String> = ["journal.db", "journal.db-wal", "journal.db-shm", "journal.lock"]
        .map(|name| directory.join(name).display().to_string())
        .to_vec();
    process.until_logged(&format!("run: chmod 600 {}", paths.join(" "))).await;
    process.kill();
    expose(&"journal.key");
    let error = Process::refused(example("kitchen_sink", &directory, &[]));
    assert!(error.contains("chmod 600"), "{error}");

    // With a key from the environment there is no key file, and without that key the journal cannot be opened.
    let (keyed, key) = (data.path().join("keyed"), "cd".repeat(32));
    let process = ToolProcess::start("kitchen_sink", &keyed, &[("RAP_TOOL_KEY", &key)]);
    check_call(&process.caller(), &mut runtime, "c").await;
    assert!(!keyed.join("journal.key").exists());
    process.kill();
    let start_error = Process::refused(example("kitchen_sink", &keyed, &[]));
    assert!(start_error.contains("was written with another key"), "{start_error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_data_directory_is_in_the_working_directory() {
    let data = data_dir();
    let mut command = example("hello", data.path(), &[]);
    command.env_remove("RAP_TOOL_DATA").current_dir(data.path());
    let process = ToolProcess::spawn(command);
    assert!(data.path().join("rap-data/hello/journal.db").exists());
    assert!(process.terminate());
}

/// Proves: LC-01, LC-05
#[tokio::test(flavor = "multi_thread")]
async fn the_hello_example_has_at_most_twelve_lines_and_works() {
    let source = include_str!("../../examples/hello.rs");
    let code = |line: &&str| !line.is_empty() && !line.starts_with("//") && !line.starts_with("use ");
    let lines = source.lines().map(str::trim).filter(code).count();
    assert!(lines <= 12, "{lines} lines of code");

    let data = data_dir();
    let process = ToolProcess::start("hello", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    let toolset = discover(&process.url).await;
    assert_eq!(toolset["endpoint"], format!("{}/invoke", process.url));
    assert_eq!(toolset["tools"][0]["name"], "greet");
    assert_eq!(toolset["tools"][0]["description"], "Greet someone by name.");
    let schema = json!({"type": "object", "required": ["name"],
                        "properties": {"name": {"type": "string", "description": "Who to greet."}}});
    assert_eq!(toolset["tools"][0]["inputSchema"], schema);
    process.caller().accepted(&runtime.invocation("greet", "t", "c", json!({"name": "Ann"}))).await;
    assert_eq!(runtime.next().await.text(), "Hello, Ann!");
    assert!(process.terminate());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tools_of_the_kitchen_sink_work() {
    let data = data_dir();
    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    let caller = process.caller();
    let tools = discover(&process.url).await["tools"].clone();
    let names: Vec<&str> =
        tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["echo", "fail", "panic", "slow", "tick", "choose", "authorize", "show"]);
    let table = [
        ("echo", json!({"text": "TEXT"}), "echo TEXT"),
        ("fail", json!({"message": "MESSAGE"}), "Error: MESSAGE"),
        ("slow", json!({"seconds": 0}), "slept 0"),
        ("slow", json!({"seconds": 0.25}), "slept 0.25"),
    ];
    for (number, (tool, arguments, expected)) in table.into_iter().enumerate() {
        caller.accepted(&runtime.invocation(tool, "t", &format!("c{number}"), arguments)).await;
        assert_eq!(runtime.next().await.text(), expected);
    }
    caller.accepted(&runtime.invocation("panic", "t", "panic", json!({}))).await;
    assert!(runtime.next().await.text().starts_with("Error: "));
    caller.accepted(&runtime.invocation("slow", "t", "cancelled", json!({"seconds": 1_000}))).await;
    caller.cancel("t", "cancelled").await;
    assert_eq!(runtime.next().await.text(), "Error: cancelled");

    caller.accepted(&runtime.invocation("tick", "t", "s", json!({"count": 3, "every_ms": 10}))).await;
    let confirmation = runtime.next().await;
    assert_eq!(confirmation.body["subscription"], true);
    assert!(confirmation.text().contains("Subscription ID: s"), "{}", confirmation.text());
    for number in 1..=3 {
        let event = runtime.next().await;
        assert_eq!(
            (event.body["type"].as_str(), event.body["tool_call_id"].as_str()),
            (Some("subscription_event"), Some("s"))
        );
        assert_eq!(event.text(), format!("tick {number}"));
        assert_eq!(event.body["final"] == json!(true), number == 3);
    }
    caller.until_settled("t", "s").await;

    // `slow` is restartable, so the next process runs it again.
    caller.accepted(&runtime.invocation("slow", "t", "again", json!({"seconds": 0.5}))).await;
    process.kill();
    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    assert_eq!(runtime.next().await.text(), "slept 0.5");
    assert!(process.terminate());
}

async fn until_refused(url: &str) {
    let address = url.trim_start_matches("http://");
    until("connections are refused", async || TcpStream::connect(address).await.is_err()).await;
}

/// Proves: LC-13
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_stops_accepting_connections_and_lets_running_calls_finish() {
    tokio::join!(finishes_after("TERM"), finishes_after("INT"));
}

async fn finishes_after(signal: &str) {
    let data = data_dir();
    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    process.caller().accepted(&runtime.invocation("slow", "t", "c", json!({"seconds": 2}))).await;
    process.signal(signal);
    until_refused(&process.url).await;
    assert!(runtime.pending().is_empty(), "the call is still running");
    assert_eq!(runtime.next().await.text(), "slept 2");
    assert!(process.wait().success());
    assert_eq!(Journal::open(data.path()).number("SELECT count(*) FROM calls WHERE state = 3"), 1);
}

/// Proves: LC-13
#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_exits_at_once_and_loses_nothing() {
    let data = data_dir();
    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    process.caller().accepted(&runtime.invocation("slow", "t", "c", json!({"seconds": 100}))).await;
    process.signal("TERM");
    process.until_logged("stopping").await;
    let begun = Instant::now();
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(1));
    assert!(begun.elapsed() < Duration::from_secs(15), "it has waited for the call");

    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    assert!(process.caller().is_alive("t", "c").await);
    process.caller().cancel("t", "c").await;
    assert_eq!(runtime.next().await.text(), "Error: cancelled");
    assert!(process.terminate());
}

#[tokio::test]
async fn run_until_finishes_running_calls_before_it_returns() {
    let (data, gate) = (data_dir(), Gate::closed());
    let gate_of_tool = gate.clone();
    let tools = server(data.path()).tool("wait", move |_: Echo, _: Call| {
        let gate = gate_of_tool.clone();
        async move {
            gate.pass().await;
            Ok("waited")
        }
    });
    let bound = tools.bind("127.0.0.1:0").await.unwrap();
    let (url, address) = (bound.url().to_owned(), bound.local_addr());
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(bound.run_until(async { stopped.await.unwrap() }));
    let mut runtime = Runtime::start().await;
    let caller = Caller::new(&url);
    caller.accepted(&runtime.invocation("wait", "t", "c", json!({"text": ""}))).await;
    gate.reached().await;
    stop.send(()).unwrap();
    until_refused(&url).await;
    assert!(!running.is_finished());
    gate.open(1);
    assert_eq!(runtime.next().await.text(), "waited");
    running.await.unwrap();
    // Address and journal can be used again.
    let bound = server(data.path()).bind(address.to_string()).await.unwrap();
    assert_eq!(bound.local_addr(), address);
}

/// Proves: LC-09, LC-13
#[tokio::test]
async fn a_call_that_does_not_finish_before_shutdown_has_its_result_after_the_next_start() {
    let data = data_dir();
    let mut limits = short_pauses();
    limits.stop_within = Duration::from_millis(200);
    let tools = || {
        let stuck = |_: Echo, _: Call| std::future::pending::<Result<String>>();
        server(data.path()).limits(limits.clone()).tool("stuck", stuck)
    };
    let first = Server::start(tools(), data.path()).await;
    let mut runtime = Runtime::start().await;
    first.caller().accepted(&runtime.invocation("stuck", "t", "c", json!({"text": ""}))).await;
    first.stop().await;
    assert!(runtime.pending().is_empty());
    let second = Server::start(tools(), data.path()).await;
    let result = runtime.next().await;
    assert!(result.text().starts_with("Error: the server restarted during the call"), "{}", result.text());
    check_call(&second.caller(), &mut runtime, "last").await;
}

#[tokio::test]
async fn maximum_values_of_limits_are_accepted() {
    let data = data_dir();
    let mut limits = short_pauses();
    limits.calls = usize::MAX;
    limits.subscriptions = usize::MAX;
    limits.waiting_events = u32::MAX;
    limits.deliveries = usize::MAX;
    limits.deliveries_per_host = usize::MAX;
    limits.arriving_bytes = usize::MAX;
    limits.connections = usize::MAX;
    limits.cancel_grace = Duration::MAX;
    limits.stop_within = Duration::MAX;
    limits.thread_ttl = Duration::MAX;
    limits.remember = Duration::MAX;
    limits.request_within = Duration::MAX;
    limits.close_within = Duration::MAX;
    let server = Server::start(server(data.path()).limits(limits), data.path()).await;
    let mut runtime = Runtime::start().await;
    runtime.answer_next(&[503, 503]);
    server.caller().accepted(&runtime.invocation("echo", "t", "c", json!({"text": "x"}))).await;
    assert_eq!(runtime.accepted().await.text(), "echo x");
    server.caller().until_settled("t", "c").await;
    server.stop().await;
}

#[tokio::test]
async fn an_environment_variable_that_is_not_utf8_is_not_ignored() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let data = data_dir();
    let mut command = example("kitchen_sink", data.path(), &[]);
    command.env("RAP_TOOL_BEARER", OsStr::from_bytes(b"t\xff"));
    let start_error = Process::refused(command);
    assert!(start_error.contains("a bearer token must have"), "{start_error}");
}
