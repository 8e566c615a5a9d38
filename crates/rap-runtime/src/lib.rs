//! A durable runtime for the Reactive Agent Protocol. An idle agent is only a row in a database.
//!
//! [`Runtime::start`] opens the database and resumes unfinished work. [`Runtime::serve`] serves tools and clients over
//! HTTP. [`Settings::new`] has defaults for everything but the database and the model, and [`Function`] makes a tool
//! from an async function; `examples/embedded.rs` shows both. The rules are defined in [`rap_agent`]. This crate loads
//! state, runs steps, commits them and carries out their effects.

pub mod backup;
mod calendar;
mod display;
pub mod doctor;
mod engine;
mod function;
mod glob;
mod http;
mod hub;
#[cfg(test)]
mod instruction_counts;
#[doc(hidden)]
pub mod measure;
mod memory;
pub mod model;
mod outgoing;
mod settings;
#[cfg(test)]
mod simulation;
mod store;
mod telemetry;
mod token;
mod tool_server;
mod toolsets;
pub mod transfer;
mod web;
mod world;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use rap_io::serve::{ServeLimits, serve_with_tls_until};
use rap_io::tls::Acceptor;
use tokio::net::TcpListener;

use crate::engine::Engine;
pub use crate::engine::StartError;
pub use crate::function::{Function, FunctionResult};
pub use crate::glob::ToolGlob;
pub use crate::settings::{
    Agent, AgentModel, AlertDestination, Database, FALLBACK_AFTER, Limits, PostgresDatabase, Settings,
    SettingsError, Window,
};
pub use crate::store::{OpenError, PostgresError, UrlError};
pub use crate::telemetry::TelemetrySettings;
pub use crate::tool_server::{CallbackAuth, ServerState, Started, ToolServer};
pub use crate::web::{WebAsset, WebAssets};
pub use rap_io::credentials::{Authorization, Credentials};
pub use rap_io::oauth::OauthClient;
pub use rap_io::proxy::TrustedProxies;
pub use rap_io::reloading::{FileError, SecretSource};
pub use rap_io::sigv4::AccessKey;
pub use rap_io::tls::{ClientCertificates, ClientTls, ServerTls};

/// A running runtime.
pub struct Runtime {
    engine: Arc<Engine>,
    tls: Option<Acceptor>,
}

impl Runtime {
    /// Opens the database and resumes unfinished work. Must be called within a tokio runtime, and blocks while the
    /// database is opened.
    pub fn start(settings: Settings) -> Result<Runtime, StartError> {
        let tls = settings.tls.clone().map(Acceptor::new).transpose().map_err(SettingsError::Tls)?;
        Ok(Runtime { engine: Engine::start(settings)?, tls })
    }

    /// Returns a router with the callback endpoint and the client API.
    pub fn router(&self) -> Router {
        http::router(Arc::clone(&self.engine))
    }

    /// Returns a future that resolves when the runtime has been idle for `period` and nothing is due within the next
    /// `period`. The process can then stop, if a service manager starts it for the next message. Open calls and
    /// subscriptions do not count as work; connected event streams do.
    pub fn idle_for(&self, period: Duration) -> impl Future<Output = ()> + use<> {
        let engine = Arc::clone(&self.engine);
        async move { engine.idle_for(period).await }
    }

    /// Serves until `stop` resolves, then shuts down gracefully. Unfinished work stays in the database.
    pub async fn serve(mut self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let limits = &self.engine.settings.limits;
        let (stop_within, serve_limits) = (
            limits.stop_within,
            ServeLimits {
                connections: limits.connections,
                head_within: limits.request_within,
                urgent_paths: &["/callback/", "/healthz", "/readyz"],
            },
        );
        let tls = self.tls.take();
        let connections = serve_with_tls_until(listener, tls, self.router(), serve_limits, stop).await;
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
