//! A connection, plain or TLS. It records progress, fails when its reader stops reading, and adds headers to responses
//! that hyper makes itself.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::pool::Progress;

/// Number of received bytes that count as progress. Fewer bytes do not, so that a request that trickles in is idle.
const RECEIVED: usize = 16 * 1024;

/// Headers of answers that no router makes, each with its line break. They fit every path.
const OWN_HEADERS: &[u8] = b"x-content-type-options: nosniff\r\ncache-control: no-store\r\n";
/// Maximum length of an answer that hyper itself makes, in bytes.
const OWN_ANSWER_BYTES: usize = 256;

/// Returns the answer with [`OWN_HEADERS`] if hyper made it. Hyper answers a request that it cannot read with 4xx and no
/// body, before any router sees it. No body of ours contains a line break of HTTP, so none is mistaken for an answer.
fn with_own_headers(bytes: &[u8]) -> Option<Vec<u8>> {
    let whole = bytes.starts_with(b"HTTP/1.1 4") && bytes.ends_with(b"\r\n\r\n");
    if !whole || bytes.len() > OWN_ANSWER_BYTES {
        return None;
    }
    let name = b"x-content-type-options";
    let has_headers = bytes.windows(name.len()).any(|window| window.eq_ignore_ascii_case(name));
    let status_line = bytes.iter().position(|byte| *byte == b'\n')? + 1;
    (!has_headers).then(|| [&bytes[..status_line], OWN_HEADERS, &bytes[status_line..]].concat())
}

pub(super) struct TrackedStream<S> {
    socket: S,
    progress: Arc<Progress>,
    received: usize,
    /// Time that a blocked write may take.
    write_within: Duration,
    /// Runs while a write is blocked.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<S> TrackedStream<S> {
    pub(super) fn new(socket: S, progress: Arc<Progress>, write_within: Duration) -> Self {
        TrackedStream { socket, progress, received: 0, write_within, blocked: None }
    }

    /// Notes the outcome of a write. A write that is blocked for too long fails.
    fn written(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.progress.note();
            self.blocked = None;
            return written;
        }
        let within = self.write_within;
        let blocked = self.blocked.get_or_insert_with(|| Box::pin(sleep(within)));
        ready!(blocked.as_mut().poll(context));
        let message = "the reader has stopped reading";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TrackedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(context, buffer))?;
        self.received += buffer.filled().len() - before;
        if self.received >= RECEIVED {
            self.received = 0;
            self.progress.note();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = match with_own_headers(bytes) {
            None => Pin::new(&mut self.socket).poll_write(context, bytes),
            // The connection ends after this answer, which is shorter than the buffer of a socket.
            Some(answer) => Pin::new(&mut self.socket)
                .poll_write(context, &answer)
                .map_ok(|count| if count == answer.len() { bytes.len() } else { 0 }),
        };
        self.written(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = bytes {
            return self.poll_write(context, only);
        }
        let written = Pin::new(&mut self.socket).poll_write_vectored(context, bytes);
        self.written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
