//! `rap export`, `rap import` and `rap migrate`: move sessions between databases and runtimes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use rap_api::Migrate as Request;
use rap_protocol::visible;
use rap_runtime::Settings;
use rap_runtime::transfer::{self, Exported, Imported, OpenCalls};

use super::{Connection, Token, WrongUsage, print, with_suggestion};

/// Interval at which the state of a move is queried.
const POLL_EVERY: Duration = Duration::from_millis(200);

/// Arguments of `rap export`.
#[derive(Args)]
pub struct Export {
    /// Id of the session's root thread.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    session: Option<String>,
    /// Export all sessions.
    #[arg(long)]
    all: bool,
    /// File to write [default: stdout]. It must not exist.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Configuration file that names the database [default: rap.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Arguments of `rap import`.
#[derive(Args)]
pub struct Import {
    /// File that `rap export` wrote.
    file: PathBuf,
    /// End open calls whose results cannot arrive, because this database has another key. Each gets an error as its result.
    #[arg(long)]
    end_calls: bool,
    /// Configuration file that names the database [default: rap.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Arguments of `rap migrate`.
#[derive(Args)]
pub struct Migrate {
    /// Id of the session's root thread.
    session: String,
    /// URL of the other runtime.
    #[arg(long, value_name = "URL")]
    to: String,
    /// Admin token of the other runtime; prefer RAP_TO_TOKEN.
    #[arg(long, value_name = "TOKEN", env = "RAP_TO_TOKEN", hide_env_values = true)]
    to_token: Token,
    /// End open calls whose results cannot arrive there, because the other runtime has another key. Each gets an error as
    /// its result.
    #[arg(long)]
    end_calls: bool,
    /// The runtime that has the session.
    #[command(flatten)]
    connection: Connection,
}

/// Runs `rap export`.
pub async fn export(arguments: Export, settings: &Settings) -> anyhow::Result<()> {
    let session = arguments.session.as_deref();
    let Exported { sessions, damaged } = match &arguments.output {
        None => transfer::export(settings, session, &mut BufWriter::new(io::stdout())).await?,
        Some(path) => export_to(path, settings, session).await?,
    };
    if sessions != 1 || arguments.all {
        eprintln!("exported {sessions} sessions");
    }
    for (session, why) in &damaged {
        eprintln!("left out session {session}, which is damaged: {}", visible::text(why));
    }
    if !damaged.is_empty() {
        eprintln!("`rap doctor` says what can be done about damaged sessions");
    }
    Ok(())
}

/// Writes to a file beside the given one first, so that the given one is complete when it appears.
async fn export_to(path: &Path, settings: &Settings, session: Option<&str>) -> anyhow::Result<Exported> {
    if path.exists() {
        return Err(WrongUsage(format!("{} exists; name another file", path.display())).into());
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    let draft = PathBuf::from(name);
    let exported = write_draft(&draft, settings, session).await;
    if exported.is_err() && draft.exists() {
        fs::remove_file(&draft).with_context(|| format!("cannot remove {}", draft.display()))?;
    }
    let exported = exported?;
    fs::rename(&draft, path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(exported)
}

async fn write_draft(draft: &Path, settings: &Settings, session: Option<&str>) -> anyhow::Result<Exported> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    // It contains whole conversations.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(draft).with_context(|| format!("cannot write {}", draft.display()))?;
    let mut out = BufWriter::new(file);
    let exported = transfer::export(settings, session, &mut out).await?;
    out.flush()?;
    out.get_ref().sync_all()?;
    Ok(exported)
}

/// Runs `rap import`.
pub async fn import(arguments: Import, settings: &Settings) -> anyhow::Result<()> {
    let path = &arguments.file;
    let open =
        || File::open(path).map(BufReader::new).with_context(|| format!("cannot read {}", path.display()));
    let place = || format!("{}: nothing was imported", path.display());
    transfer::verify(&mut open()?).with_context(place)?;
    let open_calls = if arguments.end_calls { OpenCalls::End } else { OpenCalls::Keep };
    let imported = transfer::import(settings, &mut open()?, open_calls).await;
    for session in imported.with_context(|| path.display().to_string())? {
        print(&describe(&session))?;
    }
    Ok(())
}

fn describe(imported: &Imported) -> String {
    let Imported { session, present, open_calls, ended_calls, other_url } = imported;
    let mut text = match present {
        true => format!("session {session} exists already\n"),
        false => format!("imported session {session}\n"),
    };
    if *ended_calls > 0 {
        text.push_str(&format!("  {ended_calls} open calls and subscriptions were ended\n"));
    }
    if let Some(url) = other_url.as_ref().filter(|_| *open_calls > 0) {
        text.push_str(&format!(
            "  {open_calls} open calls and subscriptions send their results to {url}: make that address lead to this server\n"
        ));
    }
    text
}

/// Runs `rap migrate`.
pub async fn migrate(arguments: Migrate) -> anyhow::Result<()> {
    let Migrate { session, to, to_token, end_calls, connection } = arguments;
    let client = connection.client()?;
    let request = Request { to: to.clone(), token: to_token.expose().to_owned(), end_calls };
    let begun = client.migrate(&session, &request).await;
    with_suggestion(&client, &session, begun).await?;
    loop {
        let state = client.last_move(&session).await?;
        match state.state.as_str() {
            "moving" => tokio::time::sleep(POLL_EVERY).await,
            "moved" => return Ok(print(&format!("moved session {session} to {to}\n"))?),
            "lost" => {
                let why = state.why.unwrap_or_default();
                return Err(anyhow!(
                    "session {session} was sent to {to}, which does not confirm that it has it: {why}. Its records stay \
                     here, out of use; `rap migrate` takes it back if no other runtime has it, and moves it again"
                ));
            }
            _ => {
                let why = state.why.unwrap_or_default();
                return Err(anyhow!("session {session} was not moved and continues here: {why}"));
            }
        }
    }
}
