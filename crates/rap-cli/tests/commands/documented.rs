//! Tests of the README and the guides: every command is executed, every configuration is loaded, and the table of settings
//! is up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rap_cli::config::{Config, File, Sources};
use rap_testkit::{Port, block_until, programs};
use tempfile::TempDir;

use crate::support::output;

/// A page without commands.
const MAP: &str = "docs/ARCHITECTURE.md";
/// Pages whose commands are executed here.
const EXECUTED: [&str; 14] = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/performance.md",
    "docs/reliability.md",
    "docs/run-an-agent.md",
    "docs/scaling.md",
    MAP,
    "docs/write-a-tool.md",
    "docs/check-your-server.md",
    "docs/connect-mcp.md",
    "docs/conformance.md",
    "docs/security.md",
    "docs/testing.md",
    "docs/tools.md",
];
/// Page whose commands crates/rap-tool/tests/server/python.rs executes.
const PYTHON: &str = "examples/python-tool/README.md";

/// Commands that are not executed here, with the reason. Every entry must still occur in a page.
const NOT_EXECUTED: [(&str, &str); 31] = [
    ("cargo run --release -- demo", "tests/commands/demo.rs runs the demo"),
    ("cargo xtask test", "it would run this test"),
    ("cargo xtask test --long", "it runs for an hour"),
    ("cargo xtask lint", "it builds everything again"),
    ("cargo xtask breaks", "it compiles for an hour"),
    ("cargo xtask attack", "it builds everything, and runs for minutes"),
    ("cargo xtask attack ssrf", "it builds everything, and runs for minutes"),
    ("cargo xtask attack --weakened", "it builds everything, and runs for minutes"),
    ("cargo xtask storm", "it builds everything, and runs for a minute"),
    ("cargo xtask storm --store postgres --seconds 3600", "it runs for an hour"),
    ("cargo xtask storm --load 10000 --seconds 600", "it builds everything, and runs for minutes"),
    ("cargo xtask fuzz", "it runs for minutes"),
    ("cargo xtask fuzz schemas --runs 10000000", "it runs for minutes"),
    ("cargo xtask picture", "it builds the release binary"),
    ("cargo bench -p rap-tool", "it measures for minutes"),
    ("cargo bench -p rap-runtime", "it measures for minutes"),
    ("cargo bench -p rap-cli", "it measures for minutes"),
    (
        "cargo install --path crates/rap-cli",
        "it builds for minutes; tests/commands/standalone.rs runs a copy of the binary",
    ),
    ("cargo new weather && cd weather", "the code of that page is compiled and run as doc tests"),
    ("cargo add rap-tool --git <the address of this repository>", "the address is the reader's"),
    ("cargo add tokio --features full", "it needs the network"),
    ("cargo add serde --features derive", "it needs the network"),
    ("cargo add schemars@1 serde_json", "it needs the network"),
    ("cargo add rap-tool --path ../rap/crates/rap-tool", "it needs the network"),
    ("cargo run", "it runs the reader's own program"),
    ("curl -s 127.0.0.1:7501/.well-known/rap-toolset", "on its page the server is the reader's own program"),
    ("curl -si 127.0.0.1:7501/invoke", "on its page the server is the reader's own program"),
    ("cargo xtask requirements", "it writes conformance.md, which cargo xtask lint compares"),
    ("rap check tool http://127.0.0.1:7503", "tests/commands/check.rs checks that server"),
    (
        "rap check runtime --strict -- rap serve --config {config}",
        "tests/commands/check.rs checks that runtime",
    ),
    ("python3 tool.py &", "crates/rap-tool/tests/server/python.rs executes that page"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn page(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A command in a page, with the output that the page shows.
#[derive(Debug)]
struct Shown {
    command: String,
    prints: Vec<String>,
    inline: bool,
}

/// Finds the commands of a page: lines of `sh` blocks, lines with `$` in `console` blocks, and inline `rap …` or `cargo …`.
fn commands(text: &str) -> Vec<Shown> {
    let mut shown: Vec<Shown> = Vec::new();
    let mut language: Option<String> = None;
    // A command continues while a quote is open or a line ends with a backslash.
    let mut open = false;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("```") {
            language = if language.is_some() { None } else { Some(rest.to_owned()) };
            continue;
        }
        match language.as_deref() {
            None => shown.extend(spans(line)),
            Some("sh" | "console") if open => {
                let last = shown.last_mut().unwrap();
                last.command = format!("{}\n{line}", last.command);
                open = goes_on(&last.command);
            }
            Some(kind @ ("sh" | "console")) => {
                let command = if kind == "sh" { Some(line) } else { line.strip_prefix("$ ") };
                match command.map(|line| line.split("  #").next().unwrap().trim()) {
                    Some("") => {}
                    Some(command) => {
                        open = goes_on(command);
                        shown.push(Shown { command: command.into(), prints: Vec::new(), inline: false });
                    }
                    None if !line.is_empty() => shown.last_mut().unwrap().prints.push(line.into()),
                    None => {}
                }
            }
            Some(_) => {}
        }
    }
    shown
}

fn goes_on(command: &str) -> bool {
    command.matches('\'').count() % 2 == 1 || command.ends_with('\\')
}

fn spans(line: &str) -> impl Iterator<Item = Shown> {
    let spans = line
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|span| span.starts_with("rap ") || span.starts_with("cargo "));
    spans.map(|span| Shown { command: span.into(), prints: Vec::new(), inline: true })
}

/// Environment in which the commands of a page are executed: a directory, a fake `cargo` that runs existing builds, and
/// free ports.
struct Sandbox {
    directory: TempDir,
    runtime: Port,
    tools: Port,
    /// Address in the text on which the example that was started last listens by default.
    example: String,
    callback: u16,
    called_back: mpsc::Receiver<String>,
    running: BTreeMap<&'static str, Child>,
}

const CARGO: &str = "#!/bin/sh
case \"$*\" in
  'run --release -- '*) shift 3; exec rap \"$@\" ;;
  'run --release -p rap-tool --example '*) exec \"$EXAMPLES/$6\" ;;
  *) echo \"no such command here: cargo $*\" >&2; exit 1 ;;
esac
";

/// Returns the address on which an example of rap-tool listens, as its source says. Only this address in a page is the
/// example's: a page that names another one does not find it.
fn listens_on(example: &str) -> String {
    let source = page(&format!("crates/rap-tool/examples/{example}.rs"));
    let (_, address) = source.split_once(".serve(\"").unwrap_or_else(|| panic!("{example} serves nothing"));
    address.split('"').next().unwrap().to_owned()
}

impl Sandbox {
    fn new() -> Sandbox {
        let directory = tempfile::tempdir().unwrap();
        let bin = directory.path().join("bin");
        fs::create_dir_all(directory.path().join("work")).unwrap();
        fs::create_dir(&bin).unwrap();
        symlink(programs::rap_path(), bin.join("rap")).unwrap();
        fs::write(bin.join("cargo"), CARGO).unwrap();
        fs::set_permissions(bin.join("cargo"), fs::Permissions::from_mode(0o755)).unwrap();
        let callbacks = TcpListener::bind("127.0.0.1:0").unwrap();
        let (runtime, tools) = (Port::reserve(), Port::reserve());
        let callback = callbacks.local_addr().unwrap().port();
        let (sender, called_back) = mpsc::channel();
        std::thread::spawn(move || {
            callbacks.incoming().for_each(|stream| take_callback(stream.unwrap(), &sender))
        });
        let example = listens_on("hello");
        Sandbox { directory, runtime, tools, example, callback, called_back, running: BTreeMap::new() }
    }

    fn shell(&self, command: &str) -> Command {
        let command = command
            .replace("7420", &self.runtime.number().to_string())
            .replace(&self.example, &self.tools.address().to_string())
            .replace("7599", &self.callback.to_string());
        let examples = programs::rap_path().with_file_name("examples");
        let path = format!("{}:/usr/bin:/bin", self.directory.path().join("bin").display());
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &command]).current_dir(self.directory.path().join("work")).stdin(Stdio::null());
        shell.env_clear().env("PATH", path).env("EXAMPLES", examples);
        shell.env("RAP_SERVER_LISTEN", self.runtime.address());
        shell
            .env("RAP_URL", format!("http://{}", self.runtime.address()))
            .env("PORT", self.tools.number().to_string());
        shell
    }

    /// Starts a server. A running server of the same kind is stopped first.
    fn start(&mut self, what: &'static str, command: &str) {
        if let Some(mut before) = self.running.remove(what) {
            before.kill().unwrap();
            before.wait().unwrap();
        }
        let mut shell = self.shell(&format!("exec {command}"));
        let child = shell.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.running.insert(what, child);
        let port = if what == "serve" { &self.runtime } else { &self.tools };
        block_until(command, || TcpStream::connect(port.address()).is_ok());
    }

    /// Executes a command that prints an endless stream. Only its beginning is checked.
    fn stream(&self, command: &str) {
        let mut child = self.shell(&format!("exec {command}")).stdout(Stdio::piped()).spawn().unwrap();
        let mut begin = [0; 16];
        child.stdout.as_mut().unwrap().read_exact(&mut begin).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(begin.starts_with(b"id: 1\nevent: ent"), "{}", String::from_utf8_lossy(&begin));
    }

    fn execute(&mut self, shown: &Shown) {
        let command = shown.command.as_str();
        if command.ends_with("serve") {
            self.start("serve", command);
        } else if let Some((_, name)) = command.split_once("--example ") {
            self.example = listens_on(name.split(' ').next().unwrap_or_default());
            self.start("example", command);
        } else if command.starts_with("curl -sN") {
            self.stream(command);
        } else if shown.inline {
            // An inline command may lack arguments, so only its existence is checked.
            let named: Vec<&str> = command.split(' ').take_while(|word| !word.contains(['…', '-'])).collect();
            let named = named.iter().filter(|word| word.chars().any(char::is_lowercase));
            let help = format!("{} --help", named.copied().collect::<Vec<_>>().join(" "));
            self.run(&help, &[]);
        } else {
            self.run(command, &shown.prints);
        }
    }

    fn run(&self, command: &str, prints: &[String]) {
        let output = output(&mut self.shell(command));
        assert_eq!(output.code, Some(0), "{command}: {output:?}");
        for line in prints {
            if let Some((_, body)) = line.split_once("POST /callback  ") {
                let sent = self.called_back.recv_timeout(Duration::from_secs(20)).unwrap();
                assert_eq!(sent, body, "{command}");
                continue;
            }
            let shown =
                line.split('…').next().unwrap().replace(&self.example, &self.tools.address().to_string());
            assert!(output.out.contains(&shown), "{command} printed:\n{}\ninstead of:\n{line}", output.out);
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// Answers 200 and sends the body to the channel.
fn take_callback(mut stream: TcpStream, sender: &mpsc::Sender<String>) {
    let (mut text, mut bytes) = (String::new(), [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        text.push_str(&String::from_utf8_lossy(&bytes[..count]));
        if let Some((_, body)) = text.split_once("\r\n\r\n").filter(|(_, body)| body.ends_with('}')) {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
            sender.send(body.to_owned()).ok();
            return;
        }
    }
}

fn not_executed(command: &str) -> Option<&'static str> {
    let is_it = |known: &&str| {
        let begins = known.starts_with("curl") || known.starts_with("rap check tool");
        command == *known || (begins && command.starts_with(known))
    };
    NOT_EXECUTED.iter().map(|(known, _)| *known).find(is_it)
}

fn execute(name: &str) {
    let mut sandbox = Sandbox::new();
    let shown = commands(&page(name));
    assert!(!shown.is_empty(), "{name}");
    for shown in shown {
        // A curl command is executed if its server is one of our examples.
        let curl = shown.command.starts_with("curl") && sandbox.running.contains_key("example");
        if curl || not_executed(&shown.command).is_none() {
            sandbox.execute(&shown);
        }
    }
}

#[test]
fn every_command_of_the_readme_is_executed() {
    execute("README.md");
}

#[test]
fn every_command_of_run_an_agent_is_executed() {
    execute("docs/run-an-agent.md");
}

#[test]
fn every_command_of_the_other_pages_is_executed() {
    let others = EXECUTED.iter().filter(|name| !["README.md", "docs/run-an-agent.md", MAP].contains(*name));
    others.for_each(|name| execute(name));
    assert!(commands(&page(MAP)).is_empty());
}

/// New pages must be added to the list.
#[test]
fn every_page_is_listed() {
    let mut pages: Vec<String> = ["docs", "examples/python-tool"]
        .iter()
        .flat_map(|folder| root().join(folder).read_dir().unwrap())
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .map(|path| path.strip_prefix(root()).unwrap().display().to_string())
        .collect();
    pages.extend(["README.md", "CONTRIBUTING.md"].map(String::from));
    let known: BTreeSet<&str> = EXECUTED.into_iter().chain([PYTHON]).collect();
    assert_eq!(pages.iter().map(String::as_str).collect::<BTreeSet<_>>(), known);
}

#[test]
fn every_exception_still_occurs_in_a_page() {
    let mut named = BTreeSet::new();
    for name in EXECUTED.into_iter().chain([PYTHON]) {
        for shown in commands(&page(name)) {
            named.extend(not_executed(&shown.command));
        }
    }
    let all: BTreeSet<&str> = NOT_EXECUTED.iter().map(|(command, _)| *command).collect();
    assert_eq!(named, all, "an exception does not occur in any page");
}

const MODEL: &str = "[model]\nprovider = \"openai\"\nname = \"m\"\napi_key = \"env:OPENAI_API_KEY\"\n";

#[test]
fn every_configuration_in_the_guide_is_valid() {
    let text = page("docs/run-an-agent.md");
    let blocks: Vec<&str> =
        text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 3);
    let directory = tempfile::tempdir().unwrap();
    for name in ["tools.token", "client.pem", "client.key", "ca.pem"] {
        fs::write(directory.path().join(name), "secret").unwrap();
    }
    for block in blocks {
        let file = directory.path().join("rap.toml");
        // Examples about agents belong to a file with a model.
        let model = if block.contains("provider = ") { "" } else { MODEL };
        fs::write(&file, format!("{model}{block}")).unwrap();
        let secrets = ["TOOLS_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OTLP_AUTHORIZATION"];
        let secrets = secrets.map(|name| (name, "secret".to_owned()));
        let store = [("DATABASE_URL", "postgres://u:p@h/db".into()), ("DATABASE_KEY", "7e".repeat(32))];
        let hmac =
            ["HMAC_NEW", "HMAC_OLD", "HOOK_SECRET"].map(|name| (name, format!("whsec_{}", "A".repeat(32))));
        let environment = secrets
            .into_iter()
            .chain(store)
            .chain(hmac)
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let sources = Sources { file: File::Given(file), environment, flags: Vec::new() };
        Config::load(&sources).unwrap_or_else(|error| panic!("{error}\n{block}"));
    }
}

/// Formats the settings of `rap init` as a table. A setting that occurs in two examples is listed once.
fn settings() -> String {
    let mut table = "| setting | default | meaning |\n|---|---|---|\n".to_owned();
    let (mut section, mut meaning, mut described) = (String::new(), Vec::new(), false);
    for line in rap_cli::init::text().lines() {
        let example = line.strip_prefix("# Example: ");
        let setting = example.or_else(|| line.strip_prefix('#')).unwrap_or(line);
        let is_setting = !line.starts_with("# ") || example.is_some();
        if setting.starts_with('[') {
            section = setting.trim_matches(['[', ']']).to_owned();
            meaning.clear();
        } else if let Some((key, value)) = setting.split_once(" = ").filter(|_| is_setting) {
            let default =
                if example.is_some() { format!("none; for example `{value}`") } else { format!("`{value}`") };
            let name = format!("| `{section}.{key}` |");
            if !table.contains(&name) {
                table.push_str(&format!("{name} {default} | {} |\n", meaning.join(" ")));
            }
            described = true;
        } else {
            // A comment before several settings applies to all of them.
            if line.is_empty() || std::mem::take(&mut described) {
                meaning.clear();
            }
            meaning.extend((!line.is_empty()).then(|| setting.trim().replace('|', "\\|")));
        }
    }
    table
}

/// If `UPDATE_DOCS` is set, the table is written instead.
#[test]
fn the_guide_lists_every_setting_with_its_default() {
    let (begin, end) = ("<!-- settings -->\n", "<!-- end of settings -->");
    let text = page("docs/run-an-agent.md");
    let (before, rest) = text.split_once(begin).unwrap();
    let (table, after) = rest.split_once(end).unwrap();
    let expected = format!("\n{}\n", settings());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(root().join("docs/run-an-agent.md"), format!("{before}{begin}{expected}{end}{after}"))
            .unwrap();
        return;
    }
    assert!(expected.contains("| `limits.hold_max` | `\"60s\"` | Maximum time"), "{expected}");
    assert_eq!(
        table, expected,
        "update it with UPDATE_DOCS=1 cargo test -p rap-cli --test commands the_guide"
    );
}
