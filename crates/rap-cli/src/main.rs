//! `rap`, the command. It alone reads flags and the process environment.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage. Errors go to stderr, each line as `rap: …`.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use rap_cli::config::{Config, Environment, FILE_NAME, File, Flag, Sources};
use rap_cli::init::{self, Existing};

/// Agents that wait, wake and remember: the Reactive Agent Protocol.
#[derive(Debug, Parser)]
#[command(name = "rap", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a commented rap.toml that lists every setting.
    Init(Init),
    /// Run the runtime: callback endpoint, client API, page.
    Serve(Serve),
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
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return explain(&error),
    };
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Init(flags) => write_config(&flags),
        Command::Serve(flags) => serve(flags),
    }
}

fn write_config(flags: &Init) -> anyhow::Result<()> {
    let existing = if flags.force { Existing::Replace } else { Existing::Keep };
    init::write(Path::new(FILE_NAME), existing)?;
    writeln!(io::stdout(), "{FILE_NAME} is written; `rap serve` reads it")?;
    Ok(())
}

fn serve(flags: Serve) -> anyhow::Result<()> {
    let config = Config::load(&flags.sources())?;
    log_to_stderr();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(rap_cli::serve::serve(config));
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

fn complain(text: &str) {
    for line in text.lines() {
        eprintln!("rap: {line}");
    }
}
