//! A running `rap serve` and a client for it.

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use tempfile::TempDir;

use crate::peer::Peer;
use crate::postgres::{Database, Server};
use crate::{Client, Port, Process, programs};

/// Configuration of a runtime.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    server: String,
    store: String,
    model: String,
    agents: String,
    tool_servers: String,
    limits: String,
    sections: String,
    environment: Vec<(String, String)>,
    token: Option<String>,
    launcher: Vec<String>,
    /// The database, which is removed after the process has ended.
    database: Option<Arc<Database<'static>>>,
}

impl Setup {
    pub fn new() -> Setup {
        Setup::default()
    }

    #[must_use]
    pub fn tools(self, tools: &Peer) -> Setup {
        let url = tools.url.clone();
        self.tool_server(&url)
    }

    #[must_use]
    pub fn tool_server(mut self, url: &str) -> Setup {
        self.tool_servers.push_str(&format!("[[tool_server]]\nurl = {url:?}\n"));
        self
    }

    /// Adds a line to the tool server that was added last.
    #[must_use]
    pub fn tool_server_line(mut self, line: &str) -> Setup {
        self.tool_servers.push_str(&format!("{line}\n"));
        self
    }

    /// Adds a tool server with these lines, such as `run = "shell"`.
    #[must_use]
    pub fn tool_lines(mut self, lines: &str) -> Setup {
        self.tool_servers.push_str(&format!("[[tool_server]]\n{lines}\n"));
        self
    }

    /// Adds an MCP server with these lines.
    #[must_use]
    pub fn mcp_lines(mut self, lines: &str) -> Setup {
        self.tool_servers.push_str(&format!("[[mcp_server]]\n{lines}\n"));
        self
    }

    /// Sets the token for the tool server that was added last.
    #[must_use]
    pub fn bearer(mut self, token: &str) -> Setup {
        self.tool_servers.push_str(&format!("bearer = {token:?}\n"));
        self
    }

    /// Adds a line for the tool server that was added last.
    #[must_use]
    pub fn tool_setting(mut self, line: &str) -> Setup {
        self.tool_servers.push_str(&format!("{line}\n"));
        self
    }

    /// Requires a client token. The client of this test sends it.
    #[must_use]
    pub fn token(mut self, token: &str) -> Setup {
        self.server.push_str(&format!("tokens = [{token:?}]\n"));
        self.token = Some(token.to_owned());
        self
    }

    /// Adds a line to `[server]`.
    #[must_use]
    pub fn server(mut self, line: &str) -> Setup {
        self.server.push_str(&format!("{line}\n"));
        self
    }

    /// Adds a line to `[store]`.
    #[must_use]
    pub fn store(mut self, line: &str) -> Setup {
        self.store.push_str(&format!("{line}\n"));
        self
    }

    /// Uses a Postgres database of its own.
    #[must_use]
    pub fn on_postgres(mut self) -> Setup {
        let database = Server::shared().database();
        self = self.store(&format!("url = {:?}\nkey = \"{}\"", database.url(), "7e".repeat(32)));
        self.database = Some(Arc::new(database));
        self
    }

    /// Adds a line to `[limits]`.
    #[must_use]
    pub fn limit(mut self, line: &str) -> Setup {
        self.limits.push_str(&format!("{line}\n"));
        self
    }

    /// Adds a section with its heading, such as `[[notify]]` and its lines.
    #[must_use]
    pub fn section(mut self, lines: &str) -> Setup {
        self.sections.push_str(&format!("{lines}\n"));
        self
    }

    /// Sets the lines of `[model]`.
    #[must_use]
    pub fn model(mut self, lines: &str) -> Setup {
        lines.clone_into(&mut self.model);
        self
    }

    #[must_use]
    pub fn agent(mut self, lines: &str) -> Setup {
        self.agents.push_str(&format!("[[agent]]\n{lines}\n"));
        self
    }

    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Setup {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts the binary through another program, such as a shell with `exec "$0" "$@"`.
    #[must_use]
    pub fn launched_by(mut self, program_and_arguments: &[&str]) -> Setup {
        self.launcher = program_and_arguments.iter().map(ToString::to_string).collect();
        self
    }

    fn text(&self) -> String {
        let Setup { server, store, model, agents, tool_servers, limits, sections, .. } = self;
        // On a busy machine, the toolset of a test may take longer than the default.
        let wait = if limits.contains("discovery_wait") { "" } else { "discovery_wait = \"20s\"\n" };
        format!(
            "[server]\n{server}[store]\n{store}[model]\n{model}\n{agents}{tool_servers}{sections}[limits]\n{wait}{limits}"
        )
    }

    /// Starts the runtime on a free port, with a new database.
    pub fn start(self) -> Rap {
        self.start_in(tempfile::tempdir().unwrap())
    }

    /// Starts the runtime in a directory that may contain a database.
    pub fn start_in(self, directory: TempDir) -> Rap {
        let mut rap = self.prepare(directory);
        rap.start_again();
        rap
    }

    /// Starts the runtime with a scenario for the scripted model.
    pub fn start_with_script(self, script: &str) -> Rap {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("script.toml"), script).unwrap();
        self.model("provider = \"scripted\"\nscript = \"script.toml\"").start_in(directory)
    }

    /// Prepares a runtime in a directory, but does not start it.
    pub fn prepare(self, directory: TempDir) -> Rap {
        fs::write(directory.path().join("rap.toml"), self.text()).unwrap();
        let port = Port::reserve();
        let client = Client::new(&format!("http://{}", port.address()), self.token.as_deref());
        Rap { client, setup: self, directory, port, process: None }
    }
}

/// A runtime with its directory and its port. Its process is killed on drop.
pub struct Rap {
    /// It ends before its directory and its database are removed.
    process: Option<Process>,
    client: Client,
    setup: Setup,
    directory: TempDir,
    port: Port,
}

impl Deref for Rap {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Rap {
    /// Starts a runtime with one tool server and default limits.
    pub fn start(tools: &Peer) -> Rap {
        Setup::new().tools(tools).start()
    }

    /// Command that serves this runtime.
    pub fn serve_command(&self) -> Command {
        self.serve_command_on(&self.port.address())
    }

    /// Command that serves this runtime on another address.
    pub fn serve_command_on(&self, address: &str) -> Command {
        let mut command = match self.setup.launcher.as_slice() {
            [] => Command::new(programs::rap_path()),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(programs::rap_path());
                command
            }
        };
        command.args(["serve", "--listen", address]).current_dir(self.directory()).env_clear();
        command.envs(self.setup.environment.iter().map(|(name, value)| (name, value)));
        let stdout = fs::OpenOptions::new().create(true).append(true).open(self.directory().join("stdout"));
        command.stdout(stdout.unwrap());
        command
    }

    /// Starts a process, after the last one was killed or has ended.
    pub fn start_again(&mut self) {
        self.process = None;
        self.process = Some(Process::start(self.serve_command()));
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        self.process_mut().kill();
    }

    /// Kills the process with SIGKILL and starts a new one with the same database and address.
    pub fn restart(&mut self) {
        self.kill();
        self.start_again();
    }

    /// Like [`Rap::restart`].
    #[must_use]
    pub fn restarted(mut self) -> Rap {
        self.restart();
        self
    }

    /// Like [`Rap::restarted`], with a pause between the two processes.
    #[must_use]
    pub fn restarted_after(mut self, pause: Duration) -> Rap {
        self.kill();
        std::thread::sleep(pause);
        self.start_again();
        self
    }

    /// Stops the process with SIGTERM and starts a new one.
    #[must_use]
    pub fn stopped_and_started(mut self) -> Rap {
        self.stop();
        self.start_again();
        self
    }

    /// Stops the process with SIGTERM. Returns how long that took.
    pub fn stop(&mut self) -> Duration {
        let began = Instant::now();
        assert!(self.process_mut().terminate().success(), "{}", self.process().log());
        began.elapsed()
    }

    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("the runtime is not started")
    }

    pub fn process_mut(&mut self) -> &mut Process {
        self.process.as_mut().expect("the runtime is not started")
    }

    /// A client that can be used while the process restarts.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// CPU time that the process has used.
    pub fn cpu_time(&self) -> Duration {
        self.process().cpu_time()
    }

    /// Directory of its files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Runs an SQL query that returns one number.
    pub fn number(&self, sql: &str) -> i64 {
        let (file, flags) = (self.directory().join("rap.db"), OpenFlags::SQLITE_OPEN_READ_ONLY);
        let database = Connection::open_with_flags(file, flags).unwrap();
        database.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Changes its database, while it does not run.
    pub fn execute(&self, sql: &str) {
        Connection::open(self.directory().join("rap.db")).unwrap().execute_batch(sql).unwrap();
    }

    /// Number of rows in a table of its database.
    pub fn rows(&self, table: &str) -> i64 {
        self.number(&format!("SELECT count(*) FROM {table}"))
    }

    /// Output on stdout so far, which is not the log.
    pub fn stdout(&self) -> String {
        fs::read_to_string(self.directory().join("stdout")).unwrap()
    }

    /// Runs a client command. Returns its exit code and its stdout followed by its stderr.
    pub fn command(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let mut command = programs::rap(arguments);
        command.env("RAP_URL", &self.url).envs(self.token().map(|token| ("RAP_TOKEN", token)));
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), text.concat())
    }

    /// Log of the process so far.
    pub fn log(&self) -> String {
        self.process().log()
    }

    pub async fn until_logged(&self, text: &str) {
        self.process().until_logged(text).await;
    }
}
