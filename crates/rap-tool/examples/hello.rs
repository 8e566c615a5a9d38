//! The smallest tool server: `cargo run --release -p rap-tool --example hello`.

use rap_tool::prelude::*;

/// Greet someone by name.
#[derive(Deserialize, JsonSchema)]
struct Greet {
    /// Who to greet.
    name: String,
}

#[tokio::main]
async fn main() -> Result<()> {
    ToolServer::new("hello")
        .tool("greet", |args: Greet, _: Call| async move { Ok(format!("Hello, {}!", args.name)) })
        .serve("127.0.0.1:7501")
        .await
}
