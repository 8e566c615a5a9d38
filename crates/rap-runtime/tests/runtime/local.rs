//! A runtime in the test process, with the scripted model.

use std::mem::take;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use rap_protocol::Secret;
use rap_runtime::model::Model;
use rap_runtime::model::scripted::Scripted;
use rap_runtime::{Credentials, Function, Limits, Runtime, Settings, ToolServer};
use rap_testkit::{Client, Tools};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Settings with the scripted model and without tool servers.
pub fn settings(directory: &TempDir) -> Settings {
    let model = Arc::new(Scripted::command_driven());
    Settings {
        public_url: "http://127.0.0.1:9".into(),
        ..Settings::new(directory.path().join("rap.db"), model)
    }
}

pub fn tool_server(tools: &Tools, bearer: Option<&str>) -> ToolServer {
    let credentials = bearer.map(|token| Credentials::bearer(Secret::new(token))).unwrap_or_default();
    ToolServer { credentials, ..ToolServer::new(tools.url.clone()) }
}

/// A running runtime and a client for it. It ends with the test.
pub struct LocalRuntime {
    client: Client,
    directory: TempDir,
    tool_servers: Vec<ToolServer>,
    functions: Vec<Function>,
    limits: Limits,
    model: Arc<dyn Model>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Deref for LocalRuntime {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl LocalRuntime {
    /// Starts a runtime with one tool server and default limits.
    pub async fn start(tools: &Tools) -> LocalRuntime {
        LocalRuntime::with(vec![tool_server(tools, None)], Limits::default()).await
    }

    /// Starts a runtime with these tool servers and limits.
    pub async fn with(tool_servers: Vec<ToolServer>, limits: Limits) -> LocalRuntime {
        let (directory, model) = (tempfile::tempdir().unwrap(), Arc::new(Scripted::command_driven()));
        LocalRuntime::start_in(directory, tool_servers, Vec::new(), limits, model).await
    }

    /// Starts a runtime with this model and no tool server.
    pub async fn with_model(model: Arc<dyn Model>, limits: Limits) -> LocalRuntime {
        LocalRuntime::start_in(tempfile::tempdir().unwrap(), Vec::new(), Vec::new(), limits, model).await
    }

    /// Starts a runtime with these functions and no tool server.
    pub async fn with_functions(
        directory: TempDir,
        functions: Vec<Function>,
        limits: Limits,
    ) -> LocalRuntime {
        let model = Arc::new(Scripted::command_driven());
        LocalRuntime::start_in(directory, Vec::new(), functions, limits, model).await
    }

    async fn start_in(
        directory: TempDir,
        tool_servers: Vec<ToolServer>,
        functions: Vec<Function>,
        limits: Limits,
        model: Arc<dyn Model>,
    ) -> LocalRuntime {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let runtime = Runtime::start(Settings {
            public_url: url.clone(),
            tool_servers: tool_servers.clone(),
            functions: functions.clone(),
            limits: limits.clone(),
            model: Arc::clone(&model),
            ..settings(&directory)
        });
        let (stop, stopped) = oneshot::channel::<()>();
        // Dropping the sender also stops the runtime.
        let task = tokio::spawn(runtime.unwrap().serve(listener, async { drop(stopped.await) }));
        let client = Client::new(&url, None);
        LocalRuntime { client, directory, tool_servers, functions, limits, model, stop, task }
    }

    /// Returns the directory of its database, `rap.db`.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Stops the runtime and starts another with the same database.
    pub async fn restarted(mut self) -> LocalRuntime {
        let (tool_servers, functions) = (take(&mut self.tool_servers), take(&mut self.functions));
        let (limits, model) = (self.limits.clone(), Arc::clone(&self.model));
        LocalRuntime::start_in(self.stop().await, tool_servers, functions, limits, model).await
    }

    /// Stops the runtime and returns the directory of its database.
    pub async fn stop(self) -> TempDir {
        drop(self.stop);
        self.task.await.unwrap();
        self.directory
    }
}
