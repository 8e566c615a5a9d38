//! The `rap` command. This is the only module that reads command-line flags and the process environment.
//!
//! Exit codes: 0 success, 1 failure, 2 wrong usage. Errors go to stderr; each line begins with `rap: `.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use rap_cli::commands::{self, Connection, WrongUsage};
use rap_cli::config::{Config, Environment, FILE_NAME, File, Flag, Sources};
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
    /// Run the runtime: callback endpoint and client API.
    Serve(Serve),
    /// Talk to an agent and watch what it does.
    Chat(commands::chat::Chat),
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
    /// List deliveries that were refused, retried or given up.
    Deliveries(Client<commands::deliveries::Command>),
    /// List tool servers, their tools and their errors.
    Tools(Client<commands::tools::Command>),
    /// Create, list and revoke tokens for clients of the API.
    Token(Client<commands::token::Command>),
    /// Check a tool server or a runtime against the requirements of the protocol.
    #[command(subcommand)]
    Check(Box<commands::check::Command>),
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
    /// Stop when stdin is closed, which happens when the parent process ends.
    #[arg(long, hide = true)]
    while_stdin_is_open: bool,
}

fn main() -> ExitCode {
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
        Command::Token(Client { command, connection }) => block_on(commands::token::run(command, connection)),
        Command::Check(command) => block_on(commands::check::run(*command)),
        Command::Completions { shell } => complete(shell),
    }
}

/// Runs a client command on a current-thread runtime.
fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

fn complete(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rap", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

fn write_config(flags: &Init) -> anyhow::Result<()> {
    let existing = if flags.force { Existing::Replace } else { Existing::Keep };
    init::write(Path::new(FILE_NAME), existing)?;
    writeln!(io::stdout(), "wrote {FILE_NAME}; `rap serve` reads it")?;
    Ok(())
}

fn serve(flags: Serve) -> anyhow::Result<()> {
    let lifetime = if flags.while_stdin_is_open { Lifetime::WhileStdinIsOpen } else { Lifetime::UntilSignal };
    let sources = flags.sources();
    let config = Config::load(&sources)?;
    log_to_stderr();
    warn_if_exposed(&[&[sources.file.path().to_owned()], &*config.secret_files].concat());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(rap_cli::serve::serve(config, lifetime));
    // A DNS lookup runs on a blocking thread that cannot be cancelled. Do not wait for it.
    runtime.shutdown_background();
    served
}

/// Initialises logging. `RUST_LOG` sets the filter; the default is `info`.
fn log_to_stderr() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colours = io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(io::stderr).init();
}

impl Serve {
    fn sources(self) -> Sources {
        let flag = |key, value: Option<String>, name| value.map(|value| Flag { key, value, name });
        let flags =
            [flag("server.listen", self.listen, "--listen"), flag("store.url", self.store, "--store")];
        Sources {
            file: self.config.map_or_else(|| File::IfPresent(FILE_NAME.into()), File::Given),
            environment: environment(),
            flags: flags.into_iter().flatten().collect(),
        }
    }
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
