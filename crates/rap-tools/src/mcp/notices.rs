//! Lines of text from MCP servers, for the log.

use std::io;

use rap_protocol::visible;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// Maximum length of a line in the log, in bytes. A longer one is divided.
const LINE_BYTES: u64 = 8 * 1024;
/// Maximum number of characters of untrusted text in an error or a log line.
const SHOWN_CHARS: usize = 500;

/// Writes the error output of a server to the log, with its name.
pub(super) async fn log_lines(server: String, mut output: impl AsyncBufRead + Unpin) {
    while let Ok(Some(line)) = next_line(&mut output).await {
        if !line.is_empty() {
            tracing::info!(server, "{}", visible::text(&line));
        }
    }
}

async fn next_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    if reader.take(LINE_BYTES).read_until(b'\n', &mut line).await? == 0 {
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()))
}

/// Returns the beginning of a text of a server, safe to show.
pub(super) fn excerpt(text: &str) -> String {
    let mut shown: String = visible::text(text.trim()).chars().take(SHOWN_CHARS).collect();
    if text.trim().chars().count() > SHOWN_CHARS {
        shown.push('…');
    }
    shown
}
