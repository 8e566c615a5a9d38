//! A subscription that survives a restart: every line that is appended to a file becomes an event.
//!
//! The cursor is the offset up to which the file has been read. It is stored together with each event, so that no
//! line is repeated or skipped, even after a crash. The environment variable `WATCH_DIR` names the directory of the
//! files.

use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rap_tool::prelude::*;
use tokio::fs::File;
use tokio::io::{AsyncBufReadExt, AsyncSeekExt, BufReader};

/// Follow a log file: each line that is appended to it from now on arrives as an event.
#[derive(Deserialize, JsonSchema)]
struct Follow {
    /// The name of the file.
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$"), length(max = 100))]
    file: String,
}

async fn follow(args: Follow, subscribe: Subscribe) -> Result<()> {
    let path = directory().join(&args.file);
    let Ok(metadata) = tokio::fs::metadata(&path).await else {
        return Err(Error::new(format!("there is no file {} to follow", args.file)));
    };
    let mut read: u64 = subscribe.cursor()?.unwrap_or(metadata.len());
    let subscription = subscribe.confirm(format!("Following {}.", args.file)).await?;
    loop {
        for (line, end) in lines_after(&path, read).await? {
            read = end;
            subscription.send(Event::new(line).cursor(read)).await?;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the complete lines after an offset, each with the offset of its end.
async fn lines_after(path: &Path, offset: u64) -> std::io::Result<Vec<(String, u64)>> {
    let mut file = File::open(path).await?;
    file.seek(SeekFrom::Start(offset)).await?;
    let (mut reader, mut end, mut lines) = (BufReader::new(file), offset, Vec::new());
    loop {
        let mut line = Vec::new();
        end += reader.read_until(b'\n', &mut line).await? as u64;
        if !line.ends_with(b"\n") {
            return Ok(lines);
        }
        lines.push((String::from_utf8_lossy(&line).trim_end().to_owned(), end));
    }
}

fn directory() -> PathBuf {
    std::env::var_os("WATCH_DIR").map_or_else(|| ".".into(), PathBuf::from)
}

#[tokio::main]
async fn main() -> Result<()> {
    ToolServer::new("watch").subscription("follow", follow).serve("127.0.0.1:7502").await
}
