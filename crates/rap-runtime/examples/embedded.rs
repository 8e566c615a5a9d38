//! A runtime inside another program, with a tool that is an async function.

use std::error::Error;
use std::sync::Arc;

use rap_runtime::model::scripted::Scripted;
use rap_runtime::{Function, FunctionResult, Runtime, Settings};
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::net::TcpListener;

/// Greet someone by name.
#[derive(Deserialize, JsonSchema)]
struct Greet {
    /// Who to greet.
    name: String,
}

async fn greet(args: Greet) -> FunctionResult {
    Ok(format!("Hello, {}!", args.name))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut settings = Settings::new("embedded.db", Arc::new(Scripted::command_driven()));
    settings.functions = vec![Function::new("greet", greet)];
    let runtime = Runtime::start(settings)?;
    let port = std::env::var("PORT").unwrap_or("7420".into());
    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    eprintln!("listening on http://{}", listener.local_addr()?);
    runtime.serve(listener, async { drop(tokio::signal::ctrl_c().await) }).await;
    Ok(())
}
