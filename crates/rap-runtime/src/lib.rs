//! A durable runtime for the Reactive Agent Protocol: agents that are rows in a database until a message wakes them.
//!
//! [`Runtime::start`] opens the database and takes up what was left; [`Runtime::serve`] listens for tools and clients.
//! The rules are those of [`rap_agent`]; this crate reads, steps, commits and carries out what a step asks for.

mod calendar;
mod display;
mod engine;
mod glob;
mod http;
mod hub;
pub mod model;
mod settings;
#[cfg(test)]
mod simulation;
mod store;
mod token;
mod toolsets;
mod world;

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use rap_io::serve::{ServeLimits, serve_until};
use tokio::net::TcpListener;

use crate::engine::Engine;
pub use crate::engine::StartError;
pub use crate::glob::ToolGlob;
pub use crate::settings::{Agent, AgentModel, Limits, Settings, SettingsError, ToolServer, Window};
pub use crate::store::OpenError;

/// A runtime at work.
pub struct Runtime {
    engine: Arc<Engine>,
}

impl Runtime {
    /// Opens the database and takes up what was left. Call it within a tokio runtime; it blocks for a moment.
    pub fn start(settings: Settings) -> Result<Runtime, StartError> {
        Ok(Runtime { engine: Engine::start(settings)? })
    }

    /// The callback endpoint and the client API.
    pub fn router(&self) -> Router {
        http::router(Arc::clone(&self.engine))
    }

    /// Serves until `stop` resolves, then stops in order and loses nothing.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let limits = &self.engine.settings.limits;
        let (stop_within, serve_limits) = (
            limits.stop_within,
            ServeLimits { connections: limits.connections, head_within: limits.request_within },
        );
        let connections = serve_until(listener, self.router(), serve_limits, stop).await;
        let answered = tokio::time::timeout(stop_within, connections.shutdown());
        let ((), answered) = tokio::join!(self.engine.shut_down(), answered);
        if answered.is_err() {
            tracing::warn!("some connections were still open when the time to finish was over");
        }
    }

    /// Takes on nothing new and closes the database. Nothing is lost.
    pub async fn shut_down(self) {
        self.engine.shut_down().await;
    }
}
