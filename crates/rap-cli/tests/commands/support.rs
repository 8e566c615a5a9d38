//! Runs the real binary against a real runtime and a real tool server.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::num::NonZero;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rap_testkit::programs::rap;
use rap_testkit::{PATIENCE, Rap, Setup, block_poll, block_until};
use rap_tool::prelude::*;
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Repeats a text.
#[derive(Deserialize, JsonSchema)]
struct Echo {
    text: String,
}

/// Sleeps for a number of seconds.
#[derive(Deserialize, JsonSchema)]
struct Slow {
    seconds: f64,
}

/// Sends one event after a number of milliseconds.
#[derive(Deserialize, JsonSchema)]
struct Tick {
    after_ms: u64,
}

/// Asks the user to choose a colour.
#[derive(Deserialize, JsonSchema)]
struct Choose {}

/// Asks the user to sign in.
#[derive(Deserialize, JsonSchema)]
struct Authorize {}

/// Returns the largest result that a runtime accepts by default.
#[derive(Deserialize, JsonSchema)]
struct Large {}

async fn slow(args: Slow, call: Call) -> Result<String> {
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(args.seconds)) => Ok(format!("slept {}", args.seconds)),
        () = call.cancelled() => Err(Error::new("stopped early")),
    }
}

/// Returns nearly 8 MiB of JSON, most of it escape sequences.
async fn large(_: Large, _: Call) -> Result<String> {
    const PIECE: &str = "\"\u{1}\\x";
    Ok(PIECE.repeat((8 * 1024 * 1024 - 16 * 1024) / 11))
}

async fn tick(args: Tick, subscribe: Subscribe) -> Result<()> {
    let subscription = subscribe.confirm("Ticking.").await?;
    tokio::time::sleep(Duration::from_millis(args.after_ms)).await;
    subscription.send(Event::new("tick tock").associative()).await?;
    std::future::pending().await
}

/// Sends one event that goes to a child.
#[derive(Deserialize, JsonSchema)]
struct News {}

async fn news(_: News, subscribe: Subscribe) -> Result<()> {
    let subscription = subscribe.confirm("Listening.").await?;
    subscription.send(Event::new("it rains")).await?;
    std::future::pending().await
}

/// Shows progress and a view, and runs until it is cancelled.
#[derive(Deserialize, JsonSchema)]
struct Build {}

async fn build(_: Build, call: Call) -> Result<&'static str> {
    call.progress(0.5, "compiling").await?;
    call.view("map", json!({"x": 1})).await?;
    call.cancelled().await;
    Ok("stopped")
}

async fn choose(_: Choose, call: Call) -> Result<String> {
    let colours = ["red", "green", "blue"];
    let chosen = call.choose("Which colour?", colours, 1).await?;
    Ok(format!("chose {}", colours[chosen]))
}

async fn authorize(_: Authorize, call: Call) -> Result<&'static str> {
    call.authorize(call.redirect_url()).await?;
    Ok("authorized")
}

/// Runs the tool server of these tests. Returns its URL.
fn serve_tools(data: &Path) -> String {
    let server = ToolServer::new("sink")
        .tool("echo", |args: Echo, _: Call| async move { Ok(format!("echo {}", args.text)) })
        .tool("slow", slow)
        .tool("large", large)
        .subscription("tick", tick)
        .subscription("news", news)
        .tool("build", build)
        .tool("choose", choose)
        .tool("authorize", authorize)
        .data(data);
    serve_in_thread(server)
}

/// Runs a tool server in a thread until the process ends. Returns its URL.
pub fn serve_in_thread(server: ToolServer) -> String {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let bound = server.bind("127.0.0.1:0").await.unwrap();
            sender.send(bound.url().to_owned()).unwrap();
            bound.run_until(std::future::pending()).await;
        });
    });
    receiver.recv().unwrap()
}

/// A runtime with a tool server, and the commands that use it.
pub struct Runtime {
    rap: Rap,
    _tools: TempDir,
}

impl Runtime {
    pub fn start() -> Runtime {
        Runtime::with(Setup::new())
    }

    /// Starts a runtime with more settings.
    pub fn with(setup: Setup) -> Runtime {
        let tools = tempfile::tempdir().unwrap();
        let rap = setup.tool_server(&serve_tools(tools.path())).start();
        Runtime { rap, _tools: tools }
    }

    pub fn kill(&mut self) {
        self.rap.kill();
    }

    pub fn start_again(&mut self) {
        self.rap.start_again();
    }

    /// Restarts the runtime with an empty database.
    pub fn replace(&mut self) {
        self.kill();
        for file in ["rap.db", "rap.db-wal", "rap.db-shm", "rap.db.key"] {
            std::fs::remove_file(self.rap.directory().join(file)).ok();
        }
        self.start_again();
    }

    pub fn url(&self) -> &str {
        &self.rap.url
    }

    /// Sends a request that no command sends.
    pub fn post(&self, path: &str, body: &str) {
        let address = self.url().trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
        write!(stream, "{head}content-length: {length}\r\n\r\n{body}").unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = rap(arguments);
        command.env("RAP_URL", self.url());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        let Output { code, out, err } = output(&mut self.command(arguments));
        Output { code, out: numbered(&out), err: numbered(&err) }
    }

    /// Runs a command that has to succeed. Returns its stdout.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.code, Some(0), "rap {}: {output:?}", arguments.join(" "));
        output.out
    }

    /// Runs a command that has to fail. Returns its stderr.
    pub fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!((output.code, output.out.as_str()), (Some(1), ""), "rap {}", arguments.join(" "));
        output.err
    }

    /// Returns the id of the call with this number in a thread, from 1.
    pub fn call(&self, thread: &str, number: usize) -> String {
        let entries = output(&mut self.command(&["threads", "tail", thread, "--json", "--once"])).out;
        let entries = entries.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let calls: Vec<Value> =
            entries.filter_map(|entry| entry["calls"].as_array().cloned()).flatten().collect();
        calls[number - 1]["id"].as_str().unwrap().to_owned()
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).unwrap()
    }

    /// Waits until the thread has this status.
    pub fn until_status(&self, thread: &str, status: &str) {
        let has_status = || self.json(&["threads", "show", thread, "--json"])["status"] == status;
        block_until(&format!("{thread} is {status}"), has_status);
    }
}

#[derive(Debug)]
pub struct Output {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs a command to its end. Panics if it does not end in time.
pub fn output(command: &mut Command) -> Output {
    let (out, err) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let mut child = command.stdout(out.reopen().unwrap()).stderr(err.reopen().unwrap()).spawn().unwrap();
    let text = |file: &tempfile::NamedTempFile| std::fs::read_to_string(file.path()).unwrap();
    let Some(status) = block_poll(PATIENCE * 3, || child.try_wait().unwrap()) else {
        child.kill().unwrap();
        child.wait().unwrap();
        panic!("{command:?} did not end in time:\n{}{}", text(&out), text(&err));
    };
    Output { code: status.code(), out: text(&out), err: text(&err) }
}

/// A running command whose output is read as it arrives.
pub struct Running {
    child: Child,
    input: Option<Box<dyn Write>>,
    output: mpsc::Receiver<String>,
    pub seen: String,
    /// Emulator of its terminal.
    screen: Arc<Mutex<vt100::Parser>>,
    /// Controlling side of its pseudoterminal; `None` on pipes.
    terminal: Option<File>,
}

impl Running {
    /// Starts the command on pipes.
    pub fn on_pipes(mut command: Command) -> Running {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, output) = mpsc::channel();
        let input: ChildStdin = child.stdin.take().unwrap();
        follow(BufReader::new(child.stdout.take().unwrap()), sender.clone());
        follow(BufReader::new(child.stderr.take().unwrap()), sender);
        let input: Option<Box<dyn Write>> = Some(Box::new(input));
        Running { child, input, output, seen: String::new(), screen: screen(80), terminal: None }
    }

    /// Starts the command on a terminal of this width.
    pub fn on_a_terminal(mut command: Command, width: u16) -> Running {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        tcsetwinsize(&terminal, size(width)).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        let side = || std::fs::File::options().read(true).write(true).open(&name).unwrap();
        command.env("TERM", "xterm").stdin(side()).stdout(side()).stderr(side());
        let child = command.spawn().unwrap();
        // The command owns copies of the other side. They have to be closed for the reader to see the end.
        drop(command);
        let terminal = File::from(terminal);
        let (sender, output) = mpsc::channel();
        let screen = screen(width);
        watch(terminal.try_clone().unwrap(), Arc::clone(&screen), sender);
        let input: Option<Box<dyn Write>> = Some(Box::new(terminal.try_clone().unwrap()));
        Running { child, input, output, seen: String::new(), screen, terminal: Some(terminal) }
    }

    /// Returns the content of the screen.
    pub fn screen(&self) -> String {
        numbered(&self.screen.lock().unwrap().screen().contents())
    }

    /// Waits until the content of the screen satisfies the condition.
    pub fn until_screen(&self, what: &str, condition: impl Fn(&str) -> bool) {
        let holds = block_poll(PATIENCE, || condition(&self.screen()));
        assert!(holds.is_some(), "timed out waiting for {what}:\n{}", self.screen());
    }

    /// Modes of the terminal.
    pub fn modes(&self) -> Termios {
        tcgetattr(self.terminal.as_ref().unwrap()).unwrap()
    }

    pub fn resize(&self, width: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(nonzero(24), nonzero(width));
        tcsetwinsize(self.terminal.as_ref().unwrap(), size(width)).unwrap();
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::WINCH).unwrap();
    }

    pub fn type_in(&mut self, text: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(text.as_bytes()).unwrap();
        input.flush().unwrap();
    }

    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Waits until this text is printed after everything that was expected before.
    pub fn expect(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        let mut fresh = String::new();
        loop {
            let shown = numbered(&plain(&fresh));
            if let Some(at) = shown.find(text) {
                let rest = shown[at + text.len()..].to_owned();
                self.seen.push_str(&fresh);
                self.put_back(rest);
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(more) => fresh.push_str(&more),
                Err(_) => panic!("`{text}` was not printed, but:\n{}{fresh}", self.seen),
            }
        }
    }

    /// Puts text that was read after the expected text back in front of the output.
    fn put_back(&mut self, rest: String) {
        let (sender, output) = mpsc::channel();
        let later = std::mem::replace(&mut self.output, output);
        sender.send(rest).unwrap();
        std::thread::spawn(move || {
            for more in later {
                if sender.send(more).is_err() {
                    return;
                }
            }
        });
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the command. Its output is in `seen`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.exit();
    }

    /// Waits for the command to exit. Its output is in `seen`.
    pub fn exit(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE * 2;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                while let Ok(more) = self.output.recv_timeout(Duration::from_millis(200)) {
                    self.seen.push_str(&more);
                }
                return status.code();
            }
            assert!(Instant::now() < deadline, "the command did not end in time");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn nonzero(number: u16) -> NonZero<u16> {
    NonZero::new(number).unwrap()
}

fn size(width: u16) -> Winsize {
    Winsize { ws_row: 24, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 }
}

fn screen(width: u16) -> Arc<Mutex<vt100::Parser>> {
    Arc::new(Mutex::new(vt100::Parser::new(nonzero(24), nonzero(width), 1000)))
}

/// Feeds the output to the emulator and to the channel.
fn watch(mut terminal: File, screen: Arc<Mutex<vt100::Parser>>, sender: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        let (mut bytes, mut waiting) = ([0; 4096], Vec::new());
        // Reading fails when the other side is closed.
        while let Ok(count @ 1..) = terminal.read(&mut bytes) {
            screen.lock().unwrap().process(&bytes[..count]);
            waiting.extend_from_slice(&bytes[..count]);
            let whole = std::str::from_utf8(&waiting).map_or_else(|error| error.valid_up_to(), str::len);
            let text = String::from_utf8(waiting.drain(..whole).collect()).unwrap();
            if sender.send(text).is_err() {
                return;
            }
        }
    });
}

fn follow(reader: impl BufRead + Send + 'static, sender: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        for line in reader.lines() {
            let Ok(line) = line else { return };
            if sender.send(format!("{line}\n")).is_err() {
                return;
            }
        }
    });
}

/// Replaces the call ids of the runtime, `rap_<16 hex digits>_N`, by `call_N`.
pub fn numbered(text: &str) -> String {
    let mut pieces = text.split("rap_");
    let mut numbered = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        match piece.split_at_checked(17) {
            Some((thread, number)) if thread.ends_with('_') && is_hex(&thread[..16]) => {
                numbered.push_str(&format!("call_{number}"));
            }
            _ => numbered.push_str(&format!("rap_{piece}")),
        }
    }
    numbered
}

fn is_hex(text: &str) -> bool {
    text.chars().all(|digit| digit.is_ascii_hexdigit())
}

/// Removes escape sequences.
pub fn plain(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}
