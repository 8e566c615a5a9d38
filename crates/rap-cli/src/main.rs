//! `rap`, the command. It alone reads flags and the process environment.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage. Errors go to stderr, each line as `rap: …`.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use rap_cli::commands::{self, Connection, WrongUsage};
use rap_cli::config::{Config, Environment, FILE_NAME, File, Flag, Sources};
use rap_cli::init::{self, Existing};
use rap_cli::serve::Lifetime;

/// A server that lives for months allocates much and small: this one is faster at it, and needs less for it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Agents that wait, wake and remember: the Reactive Agent Protocol.
#[derive(Parser)]
#[command(name = "rap", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// See what this is about, in half a minute: no key, no configuration, no network.
    Demo(commands::demo::Demo),
    /// Write a commented rap.toml that lists every setting.
    Init(Init),
    /// Run the runtime: callback endpoint and client API.
    Serve(Serve),
    /// Talk to an agent, and see what it does.
    Chat(commands::chat::Chat),
    /// Work with threads: what agents are at, and what they are told.
    Threads(Client<commands::threads::Command>),
    /// What agents have called and wait for.
    Calls(Client<commands::calls::Command>),
    /// What agents are subscribed to.
    Subs(Client<commands::subs::Command>),
    /// What happens by itself at a time: sleeps, schedules, time-outs, retries.
    Timers(Client<commands::timers::Command>),
    /// Every question that waits for a person.
    Inbox(Client<commands::inbox::Command>),
    /// What was refused, retried or given up, of everything sent and received.
    Deliveries(Client<commands::deliveries::Command>),
    /// Which tools there are, and what is wrong with the others.
    Tools(Client<commands::tools::Command>),
    /// Check an implementation of the protocol, requirement by requirement.
    #[command(subcommand)]
    Check(Box<commands::check::Command>),
    /// Print a script that completes rap's commands in a shell.
    #[command(after_help = "Example: rap completions bash > ~/.local/share/bash-completion/completions/rap")]
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Commands that talk to a runtime.
#[derive(Args)]
struct Client<C: Subcommand> {
    #[command(subcommand)]
    command: C,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Debug, Args)]
struct Init {
    /// Write over a rap.toml that is there already.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct Serve {
    /// The configuration; rap.toml is read if it is there.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The address to listen on; goes over server.listen.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Where everything is kept; goes over store.url.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Stop when stdin is closed, as it is when whoever started this is gone.
    #[arg(long, hide = true)]
    while_stdin_is_open: bool,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return explain(&error),
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough of it.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            if error.is::<WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Init(flags) => write_config(&flags),
        Command::Serve(flags) => serve(flags),
        Command::Demo(demo) => wait(commands::demo::run(demo)),
        Command::Chat(chat) => wait(commands::chat::run(chat)),
        Command::Threads(Client { command, connection }) => wait(commands::threads::run(command, connection)),
        Command::Calls(Client { command, connection }) => wait(commands::calls::run(command, connection)),
        Command::Subs(Client { command, connection }) => wait(commands::subs::run(command, connection)),
        Command::Timers(Client { command, connection }) => wait(commands::timers::run(command, connection)),
        Command::Inbox(Client { command, connection }) => wait(commands::inbox::run(command, connection)),
        Command::Deliveries(Client { command, connection }) => {
            wait(commands::deliveries::run(command, connection))
        }
        Command::Tools(Client { command, connection }) => wait(commands::tools::run(command, connection)),
        Command::Check(command) => wait(commands::check::run(*command)),
        Command::Completions { shell } => complete(shell),
    }
}

/// Runs a client: one thread is enough for it.
fn wait(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
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
    writeln!(io::stdout(), "{FILE_NAME} is written; `rap serve` reads it")?;
    Ok(())
}

fn serve(flags: Serve) -> anyhow::Result<()> {
    let lifetime = if flags.while_stdin_is_open { Lifetime::OfStdin } else { Lifetime::UntilSignal };
    let config = Config::load(&flags.sources())?;
    log_to_stderr();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(rap_cli::serve::serve(config, lifetime));
    // A name that is being resolved can not be stopped, and nobody waits for it.
    runtime.shutdown_background();
    served
}

/// `RUST_LOG` says how much; `info` unless it is set.
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

/// What is not Unicode is kept as far as it goes, so that it is refused and not overlooked.
fn environment() -> Environment {
    let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// Help and the version are no errors; the rest is wrong usage.
fn explain(error: &clap::Error) -> ExitCode {
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

fn complain(text: &str) {
    for line in text.lines() {
        eprintln!("rap: {line}");
    }
}
