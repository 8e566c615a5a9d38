//! `rap backup`: copies the SQLite database of a runtime, which may be running.

use std::path::PathBuf;

use clap::Args;
use rap_runtime::{Settings, backup};

use super::print;

/// Arguments of `rap backup`.
#[derive(Args)]
pub struct Backup {
    /// File to write. It must not exist. The key of the database is written to FILE.key, which must not exist either.
    file: PathBuf,
    /// Configuration file that names the database [default: rap.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Runs `rap backup`.
pub async fn run(arguments: Backup, settings: &Settings) -> anyhow::Result<()> {
    let (file, database) = (arguments.file, settings.database.clone());
    let to = file.clone();
    let written = tokio::task::spawn_blocking(move || backup::backup(&database, &to)).await??;
    Ok(print(&format!(
        "wrote {} ({} bytes) and {}\nboth are needed: without the key, open calls cannot send their results\n",
        file.display(),
        written.bytes,
        written.key.display()
    ))?)
}
