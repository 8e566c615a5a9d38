//! The `rap` command. Except for the variables that clap reads (`env =`), this is the only module that reads the process
//! environment.
//!
//! Exit codes: 0 success, 1 failure, 2 wrong usage. Errors go to stderr and begin with `rap: `.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use rap_cli::commands::{self, Connection, WrongUsage};
use rap_cli::config::{Config, Environment, FILE_NAME, File, Flag, Sources, parse_duration};
use rap_cli::init::{self, Existing};
use rap_cli::serve::Lifetime;
use rap_io::exposure::warn_if_exposed;
use rap_protocol::visible;

/// A long-running server makes many small allocations. mimalloc is faster at these than the system allocator and uses
/// less memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Run durable agents with the Reactive Agent Protocol.
#[derive(Parser)]
#[command(name = "rap", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show a running agent in half a minute; needs no API key, configuration or network.
    Demo(commands::demo::Demo),
    /// Write a commented rap.toml that lists every setting.
    Init(Init),
    /// Run the runtime: callback endpoint, client API and web interface.
    Serve(Serve),
    /// Talk to an agent and watch what it does.
    Chat(commands::chat::Chat),
    /// Watch a runtime: threads, queues, calls, tokens and cost, and what waits for a person.
    Top(commands::top::Top),
    /// List, create and control threads (conversations with agents).
    Threads(Client<commands::threads::Command>),
    /// List and cancel open tool calls.
    Calls(Client<commands::calls::Command>),
    /// List and cancel subscriptions.
    Subs(Client<commands::subs::Command>),
    /// List timers: sleeps, schedules, timeouts and retries.
    Timers(Client<commands::timers::Command>),
    /// List and answer questions that wait for a person.
    Inbox(Client<commands::inbox::Command>),
    /// List, show and retry deliveries that were refused, retried or given up.
    Deliveries(Client<commands::deliveries::Command>),
    /// List tool servers, their tools and their errors.
    Tools(Client<commands::tools::Command>),
    /// List the nodes that share the database.
    Nodes(Client<commands::nodes::Command>),
    /// Copy the SQLite database of a runtime, which may be running, together with its key.
    #[command(after_help = "Example: rap backup /backup/rap-monday.db")]
    Backup(commands::backup::Backup),
    /// Delete sessions that have been closed for at least a given time.
    #[command(after_help = "Example: rap prune --closed-for 30d --dry-run")]
    Prune(commands::prune::Prune),
    /// Write a session, or all of them, to a file that any database can import.
    #[command(after_help = "Example: rap export --all -o sessions.jsonl")]
    Export(commands::moving::Export),
    /// Import the sessions of a file into a database. Stop the runtime that uses the database first.
    #[command(after_help = "Example: rap import sessions.jsonl --config postgres.toml")]
    Import(commands::moving::Import),
    /// Move a session to another runtime, with the state of its tool servers.
    #[command(after_help = "Example: RAP_TO_TOKEN=… rap migrate t018c --to https://agents.example")]
    Migrate(commands::moving::Migrate),
    /// Find and explain damage in a database. It only reads; a runtime may be using the database.
    #[command(after_help = "Exit code: 0 when nothing is damaged, 1 otherwise.")]
    Doctor(commands::doctor::Doctor),
    /// Check the configured models.
    #[command(subcommand)]
    Models(Models),
    /// Start a tool server that ships with rap.
    #[command(subcommand)]
    Tool(commands::tool::Command),
    /// Offer RAP tools and agents to MCP clients.
    #[cfg(feature = "mcp")]
    #[command(subcommand)]
    Mcp(commands::mcp::Command),
    /// Create, list and revoke tokens for clients of the API.
    Token(Client<commands::token::Command>),
    /// Check a tool server or a runtime against the requirements of the protocol.
    #[command(subcommand)]
    Check(Box<commands::check::Command>),
    /// Print the manual page of rap, or of a command.
    #[command(after_help = "Examples: rap man | man -l -\n          rap man --dir ~/.local/share/man/man1")]
    Man {
        /// Command, such as: threads ls.
        #[arg(conflicts_with = "dir")]
        command: Vec<String>,
        /// Write the pages of all commands to this directory.
        #[arg(long, value_name = "DIRECTORY")]
        dir: Option<PathBuf>,
    },
    /// Measure round trips, memory and latency on this machine, and compare them with its disk and loopback network.
    #[command(
        after_help = "It takes a few minutes and uses the whole machine. It sends nothing to other machines.\n\n\
                      Example: rap bench --plots plots"
    )]
    Bench(commands::bench::Bench),
    /// Print a shell completion script.
    #[command(after_help = "Example: rap completions bash > ~/.local/share/bash-completion/completions/rap")]
    Completions {
        /// Shell to generate the script for.
        shell: Shell,
    },
}

/// Arguments of the commands that talk to a runtime.
#[derive(Args)]
struct Client<C: Subcommand> {
    #[command(subcommand)]
    command: C,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Debug, Args)]
struct Init {
    /// Overwrite an existing rap.toml.
    #[arg(long)]
    force: bool,
    /// Provider of the model to set.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(init::providers()))]
    provider: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Models {
    /// Ask each configured model for a word, a tool call and the colour of an image, and show what works and what it costs.
    #[command(after_help = "Exit code: 0 if all checks of all models succeed, 1 otherwise.")]
    Check {
        /// Configuration file [default: rap.toml, if it exists].
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct Serve {
    /// Configuration file [default: rap.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on; overrides server.listen.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// URL of the database; overrides store.url.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Exit when nothing has happened for this long (default: 60s) and nothing is due within as long. Open calls do not
    /// count: a callback can start the process again, for example by systemd socket activation.
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "60s", value_parser = idle_time)]
    until_idle: Option<Duration>,
    /// Format of the log on stderr.
    #[arg(long, value_name = "FORMAT", env = "RAP_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// Stop when stdin is closed, which happens when the parent process ends.
    #[arg(long, hide = true)]
    while_stdin_is_open: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object per line.
    Json,
}

fn main() -> ExitCode {
    rap_tool::process::init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return print_clap_error(&error),
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has closed the pipe.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&commands::error_text(&error));
            if error.is::<WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Init(flags) => write_config(&flags),
        Command::Serve(flags) => serve(flags),
        Command::Demo(demo) => block_on(commands::demo::run(demo)),
        Command::Chat(chat) => block_on(commands::chat::run(chat)),
        Command::Top(top) => block_on(commands::top::run(top)),
        Command::Threads(Client { command, connection }) => {
            block_on(commands::threads::run(command, connection))
        }
        Command::Calls(Client { command, connection }) => block_on(commands::calls::run(command, connection)),
        Command::Subs(Client { command, connection }) => block_on(commands::subs::run(command, connection)),
        Command::Timers(Client { command, connection }) => {
            block_on(commands::timers::run(command, connection))
        }
        Command::Inbox(Client { command, connection }) => block_on(commands::inbox::run(command, connection)),
        Command::Deliveries(Client { command, connection }) => {
            block_on(commands::deliveries::run(command, connection))
        }
        Command::Tools(Client { command, connection }) => block_on(commands::tools::run(command, connection)),
        Command::Nodes(Client { command, connection }) => block_on(commands::nodes::run(command, connection)),
        Command::Tool(command) => run_tool(command),
        #[cfg(feature = "mcp")]
        Command::Mcp(command) => run_mcp(command),
        Command::Token(Client { command, connection }) => block_on(commands::token::run(command, connection)),
        Command::Backup(mut backup) => {
            let settings = database_settings(backup.config.take())?;
            block_on(commands::backup::run(backup, &settings))
        }
        Command::Prune(prune) => block_on(commands::prune::run(prune)),
        Command::Export(mut export) => {
            let settings = database_settings(export.config.take())?;
            block_on(commands::moving::export(export, &settings))
        }
        Command::Import(mut import) => {
            let settings = database_settings(import.config.take())?;
            block_on(commands::moving::import(import, &settings))
        }
        Command::Migrate(migrate) => block_on(commands::moving::migrate(migrate)),
        Command::Bench(bench) => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            let measured = runtime.block_on(commands::bench::run(bench));
            // A part of the benchmark waits for its parent on a blocking thread that cannot be cancelled.
            runtime.shutdown_background();
            measured
        }
        Command::Doctor(mut doctor) => {
            let database = match doctor.file.take() {
                Some(file) => rap_runtime::Database::File(file),
                None => database_settings(doctor.config.take())?.database,
            };
            block_on(commands::doctor::run(doctor, &database))
        }
        Command::Models(Models::Check { config }) => {
            let file = config_file(config);
            let sources = Sources { file, environment: environment(), flags: Vec::new() };
            block_on(commands::models::check(Config::load(&sources)?))
        }
        Command::Check(command) => block_on(commands::check::run(*command)),
        Command::Man { command, dir: None } => manual(&command),
        Command::Man { dir: Some(dir), .. } => write_manual(&dir),
        Command::Completions { shell } => complete(shell),
    }
}

/// Runs a client command on a current-thread runtime.
fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

fn run_tool(command: commands::tool::Command) -> anyhow::Result<()> {
    log_to_stderr();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(commands::tool::run(command, &environment()));
    // A blocking read of a file cannot be cancelled. Do not wait for it.
    runtime.shutdown_background();
    served
}

#[cfg(feature = "mcp")]
fn run_mcp(command: commands::mcp::Command) -> anyhow::Result<()> {
    // The library logs every notification.
    log_to_stderr_with("info,rmcp=warn", LogFormat::Text);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(commands::mcp::run(command));
    // A blocking read of stdin cannot be cancelled. Do not wait for it.
    runtime.shutdown_background();
    served
}

fn complete(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rap", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

/// Prints the manual page of a command.
fn manual(path: &[String]) -> anyhow::Result<()> {
    let mut command = Cli::command();
    command.build();
    for name in path {
        let found = command.find_subcommand(name).cloned();
        command = found.ok_or_else(|| WrongUsage(format!("there is no command `{}`", path.join(" "))))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    io::stdout().write_all(&page)?;
    Ok(())
}

/// Writes a manual page for each command.
fn write_manual(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::command(), dir)?;
    Ok(())
}

fn write_config(flags: &Init) -> anyhow::Result<()> {
    let existing = if flags.force { Existing::Replace } else { Existing::Keep };
    init::write(Path::new(FILE_NAME), existing, flags.provider.as_deref())?;
    let next = match flags.provider.as_deref().and_then(init::key_variable) {
        Some(variable) => format!("; set {variable}, then try the model with `rap models check`"),
        None => String::new(),
    };
    writeln!(io::stdout(), "wrote {FILE_NAME}; `rap serve` reads it{next}")?;
    Ok(())
}

fn serve(flags: Serve) -> anyhow::Result<()> {
    let lifetime = match flags.until_idle {
        Some(period) => Lifetime::UntilIdle(period),
        None if flags.while_stdin_is_open => Lifetime::WhileStdinIsOpen,
        None => Lifetime::UntilSignal,
    };
    let format = flags.log_format;
    let sources = flags.sources();
    let config = Config::load(&sources)?;
    log_to_stderr_with("info", format);
    warn_if_exposed(&[&[sources.file.path().to_owned()], &*config.secret_files].concat());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(rap_cli::serve::serve(config, &sources.environment, lifetime));
    // A DNS lookup runs on a blocking thread that cannot be cancelled. Do not wait for it.
    runtime.shutdown_background();
    served
}

fn idle_time(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text)
        .filter(|period| *period >= Duration::from_secs(1))
        .ok_or("expected a time of at least one second such as 60s or 5m")
}

/// Returns the settings of the runtime whose database a command uses.
fn database_settings(config: Option<PathBuf>) -> anyhow::Result<rap_runtime::Settings> {
    let sources = Sources { file: config_file(config), environment: environment(), flags: Vec::new() };
    let config = Config::load(&sources)?;
    let listen = config.server.listen;
    rap_cli::serve::settings(config, listen, Vec::new())
}

/// Initialises logging. `RUST_LOG` sets the filter; the default is `info`.
fn log_to_stderr() {
    log_to_stderr_with("info", LogFormat::Text);
}

fn log_to_stderr_with(default: &str, format: LogFormat) {
    use rap_io::log::{VisibleJsonLog, VisibleLog};
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let colours = io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    match format {
        LogFormat::Text => log.with_ansi(colours).with_writer(|| VisibleLog(io::stderr())).init(),
        LogFormat::Json => {
            log.json().flatten_event(true).with_writer(|| VisibleJsonLog(io::stderr())).init();
        }
    }
}

impl Serve {
    fn sources(self) -> Sources {
        let flag = |key, value: Option<String>, name| value.map(|value| Flag { key, value, name });
        let flags =
            [flag("server.listen", self.listen, "--listen"), flag("store.url", self.store, "--store")];
        Sources {
            file: config_file(self.config),
            environment: environment(),
            flags: flags.into_iter().flatten().collect(),
        }
    }
}

/// Returns the given configuration file, or the default one.
fn config_file(given: Option<PathBuf>) -> File {
    given.map_or_else(|| File::IfPresent(FILE_NAME.into()), File::Given)
}

/// Returns the process environment. Invalid Unicode is replaced, so that such a value fails validation instead of being
/// ignored.
fn environment() -> Environment {
    let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// Prints help or the version to stdout, or a usage error to stderr. Returns the exit code.
fn print_clap_error(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        eprint!("{}", error.render().to_string().replacen("error: ", "rap: ", 1));
        return ExitCode::from(2);
    }
    match error.print() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_closed) => ExitCode::FAILURE,
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints an error, which may contain text of a server.
fn print_error(text: &str) {
    for line in visible::text(text).lines() {
        eprintln!("rap: {line}");
    }
}
