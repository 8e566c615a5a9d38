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
use tokio_util::sync::CancellationToken;

/// Maximum length of a line, in bytes. A longer one is skipped.
const LINE_BYTES: usize = 16 * 1024 * 1024;

/// Time that calls have to end after stdin was closed.
const GRACE: Duration = Duration::from_secs(1);

/// Serves one client until it closes stdin, or until `stop` is cancelled. `end` runs when calls have to end.
pub(super) async fn serve(
    handler: impl ServerHandler,
    stop: CancellationToken,
    end: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<()> {
    let (stdin, stdout) = stdio_pipes();
    let transport = AsyncRwTransport::new_server(stdin, stdout).with_max_line_length(LINE_BYTES);
    let transport = FromFirstRequest { transport, has_begun: false, end: Some(Box::pin(end)) };
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

/// Skips what arrives before the first request. There is nothing that it could refer to.
struct FromFirstRequest {
    transport: AsyncRwTransport<RoleServer, StdioReader, StdioWriter>,
    has_begun: bool,
    /// Runs some time after the end of the input.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Transport<RoleServer> for FromFirstRequest {
    type Error = io::Error;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.transport.send(item)
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
                return Some(message);
            }
            tracing::warn!("a message before the first request was skipped");
        }
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        self.transport.close().await
    }
}
