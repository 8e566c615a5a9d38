//! Two tool servers in one axum application, each with its own state, token and layers.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::routing::get;
use rap_tool::prelude::*;
use tokio::net::TcpListener;

/// Adds to a counter and returns its new value.
#[derive(Deserialize, JsonSchema)]
struct Count {
    /// How much to add.
    by: u64,
}

/// Reverses a text.
#[derive(Deserialize, JsonSchema)]
struct Reverse {
    /// The text to reverse.
    text: String,
}

struct Counter(AtomicU64);

async fn count(args: Count, call: Call) -> Result<String> {
    let counter = call.state::<Counter>();
    Ok((counter.0.fetch_add(args.by, Ordering::Relaxed) + args.by).to_string())
}

async fn reverse(args: Reverse, _: Call) -> Result<String> {
    Ok(args.text.chars().rev().collect())
}

#[tokio::main]
async fn main() -> Result<()> {
    let port = std::env::var("PORT").unwrap_or_else(|_| "7504".into());
    let data = std::path::PathBuf::from(std::env::var("RAP_TOOL_DATA").unwrap_or_else(|_| "rap-data".into()));
    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    let base = format!("http://{}", listener.local_addr()?);

    let numbers = ToolServer::new("numbers")
        .tool("count", count)
        .state(Counter(AtomicU64::new(0)))
        .bearer("numbers-token")
        .public_url(format!("{base}/numbers"))
        .data(data.join("numbers"))
        .mount()
        .await?;
    let texts = ToolServer::new("texts")
        .tool("reverse", reverse)
        .bearer("texts-token")
        .public_url(format!("{base}/texts"))
        .data(data.join("texts"))
        .mount()
        .await?;

    let marked = middleware::from_fn(|request, next: Next| async move {
        let mut response = next.run(request).await;
        let (name, value) = (HeaderName::from_static("x-served-by"), HeaderValue::from_static("texts"));
        response.headers_mut().insert(name, value);
        response
    });
    let application: Router = Router::new()
        .route("/", get(|| async { "two tool servers: /numbers and /texts\n" }))
        .nest("/numbers", numbers.router())
        .nest("/texts", texts.router().layer(marked));

    eprintln!("listening url={base}");
    let stop = async { tokio::signal::ctrl_c().await.expect("cannot listen for signals") };
    axum::serve(listener, application).with_graceful_shutdown(stop).await?;
    numbers.shut_down().await;
    texts.shut_down().await;
    Ok(())
}
