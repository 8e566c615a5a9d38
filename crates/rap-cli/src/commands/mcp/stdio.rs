//! MCP over stdin and stdout.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use rmcp::model::JsonRpcMessage;
use rmcp::service::{QuitReason, RxJsonRpcMessage, ServerInitializeError, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::io::{StdioReader, StdioWriter, stdio_pipes};
use rmcp::{RoleServer, ServerHandler, ServiceExt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, DuplexStream};
use tokio_util::sync::CancellationToken;

use super::tasks;

/// Maximum length of a line, in bytes. A longer one is skipped.
const LINE_BYTES: usize = 16 * 1024 * 1024;

/// Size of the buffers between the input and the library, in bytes.
const PIPE_BYTES: usize = 64 * 1024;

/// Time that calls have to end after stdin was closed.
const GRACE: Duration = Duration::from_secs(1);

/// Serves one client until it closes stdin, or until `stop` is cancelled. `end` runs when calls have to end.
pub(super) async fn serve(
    handler: impl ServerHandler,
    stop: CancellationToken,
    end: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<()> {
    let (stdin, stdout) = stdio_pipes();
    let has_tasks = handler.get_info().capabilities.supports_tasks();
    let transport = AsyncRwTransport::new_server(marked(stdin), stdout).with_max_line_length(LINE_BYTES);
    let transport = FromFirstRequest { transport, has_begun: false, has_tasks, end: Some(Box::pin(end)) };
    let running = match handler.serve_with_ct(transport, stop).await {
        Ok(running) => running,
        Err(ServerInitializeError::ConnectionClosed(_) | ServerInitializeError::Cancelled) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match running.waiting().await? {
        QuitReason::JoinError(error) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns the lines of the input, in which requests for tasks are marked.
fn marked(input: StdioReader) -> DuplexStream {
    let (mut writer, reader) = tokio::io::duplex(PIPE_BYTES);
    tokio::spawn(async move {
        let mut input = BufReader::with_capacity(PIPE_BYTES, input);
        let mut line = Vec::new();
        // A line that is too long comes in parts, which stay as they are.
        while let Ok(1..) = (&mut input).take(LINE_BYTES as u64).read_until(b'\n', &mut line).await {
            let written = match tasks::mark(&line) {
                Some(marked) => writer.write_all(&marked).await,
                None => writer.write_all(&line).await,
            };
            if written.is_err() {
                return;
            }
            line.clear();
        }
    });
    reader
}

/// Skips what arrives before the first request. There is nothing that it could refer to.
struct FromFirstRequest {
    transport: AsyncRwTransport<RoleServer, DuplexStream, StdioWriter>,
    has_begun: bool,
    has_tasks: bool,
    /// Runs some time after the end of the input.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Transport<RoleServer> for FromFirstRequest {
    type Error = io::Error;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.transport.send(tasks::announce(item))
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        loop {
            let Some(message) = self.transport.receive().await else {
                if let Some(end) = self.end.take() {
                    tokio::spawn(async move {
                        tokio::time::sleep(GRACE).await;
                        end.await;
                    });
                }
                return None;
            };
            self.has_begun |= matches!(message, JsonRpcMessage::Request(_));
            if self.has_begun {
                return Some(if self.has_tasks { tasks::route(message) } else { message });
            }
            tracing::warn!("a message before the first request was skipped");
        }
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        self.transport.close().await
    }
}
