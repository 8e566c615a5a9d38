//! A durable runtime for the Reactive Agent Protocol. An idle agent is only a row in a database.
//!
//! [`Runtime::start`] opens the database and resumes unfinished work. [`Runtime::serve`] serves tools and clients over
//! HTTP. [`Settings::new`] has defaults for everything but the database and the model, and [`Function`] makes a tool from an
//! async function; `examples/embedded.rs` shows both. The rules are defined in [`rap_agent`]. This crate loads state, runs steps, commits them and carries out their
//! effects.

mod calendar;
mod display;
mod engine;
mod function;
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
pub use crate::function::{Function, FunctionResult};
pub use crate::glob::ToolGlob;
pub use crate::settings::{Agent, AgentModel, Database, Limits, Settings, SettingsError, ToolServer, Window};
pub use crate::store::{OpenError, PostgresError, UrlError};

/// A running runtime.
pub struct Runtime {
    engine: Arc<Engine>,
}

impl Runtime {
    /// Opens the database and resumes unfinished work. Must be called within a tokio runtime, and blocks while the
    /// database is opened.
    pub fn start(settings: Settings) -> Result<Runtime, StartError> {
        Ok(Runtime { engine: Engine::start(settings)? })
    }

    /// Returns a router with the callback endpoint and the client API.
    pub fn router(&self) -> Router {
        http::router(Arc::clone(&self.engine))
    }

    /// Serves until `stop` resolves, then shuts down gracefully. Unfinished work stays in the database.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let limits = &self.engine.settings.limits;
        let (stop_within, serve_limits) = (
            limits.stop_within,
            ServeLimits {
                connections: limits.connections,
                head_within: limits.request_within,
                urgent_paths: &["/callback/", "/healthz", "/readyz"],
            },
        );
        let connections = serve_until(listener, self.router(), serve_limits, stop).await;
        let answered = tokio::time::timeout(stop_within, connections.shutdown());
        let ((), answered) = tokio::join!(self.engine.shut_down(), answered);
        if answered.is_err() {
            tracing::warn!("some connections were still open when the shutdown time limit was reached");
        }
    }

    /// Starts no new work, waits for work in progress within a time limit and closes the database. Unfinished work is
    /// resumed at the next start.
    pub async fn shut_down(self) {
        self.engine.shut_down().await;
    }
}

/// Runs the Rust code of the guide as a doc test.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../docs/run-an-agent.md")]
    struct RunAnAgent;
}
