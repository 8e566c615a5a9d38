//! The two tool servers of the demo: an oven with a slow tool, and a doorbell with a subscription.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rap_tool::prelude::*;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

/// Bakes something, which takes a while.
#[derive(Deserialize, JsonSchema)]
struct Bake {
    /// What to bake.
    what: String,
    /// How long it takes.
    #[schemars(range(min = 0, max = 3600))]
    seconds: f64,
}

/// Sends an event whenever somebody rings the doorbell.
#[derive(Deserialize, JsonSchema)]
struct Doorbell {}

/// Sends a line to the demo's output when the oven does something.
type OvenLog = mpsc::UnboundedSender<String>;

#[derive(Clone, Default)]
struct Button(Arc<Notify>);

/// The running servers. They stop when this is dropped.
pub(super) struct DemoTools {
    pub oven_url: String,
    pub doorbell_url: String,
    /// Lines that the oven reports.
    pub oven_log: mpsc::UnboundedReceiver<String>,
    button: Button,
    servers: Vec<JoinHandle<()>>,
}

impl DemoTools {
    pub(super) async fn start(directory: &Path) -> anyhow::Result<DemoTools> {
        let (log_sender, oven_log) = mpsc::unbounded_channel::<String>();
        let button = Button::default();
        let oven = ToolServer::new("oven")
            .description("An oven.")
            .offer(Tool::new("bake", bake).long_running())
            .state::<OvenLog>(log_sender)
            .data(directory.join("oven"))
            .bind("127.0.0.1:0")
            .await?;
        let doorbell = ToolServer::new("doorbell")
            .description("A doorbell.")
            .subscription("doorbell", listen)
            .state(button.clone())
            .data(directory.join("doorbell"))
            .bind("127.0.0.1:0")
            .await?;
        let (oven_url, doorbell_url) = (oven.url().to_owned(), doorbell.url().to_owned());
        // The servers run until the process ends and need no orderly shutdown.
        let servers = [oven, doorbell].map(|server| tokio::spawn(server.run_until(std::future::pending())));
        Ok(DemoTools { oven_url, doorbell_url, oven_log, button, servers: servers.into() })
    }

    pub(super) fn ring(&self) {
        self.button.0.notify_one();
    }
}

impl Drop for DemoTools {
    fn drop(&mut self) {
        self.servers.iter().for_each(JoinHandle::abort);
    }
}

async fn bake(args: Bake, call: Call) -> Result<String> {
    let Bake { what, seconds } = args;
    let log = |text: String| {
        // The receiver is gone when the demo is over.
        call.state::<OvenLog>().send(text).ok();
    };
    log(format!("{what}: baking for {seconds} s"));
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(seconds)) => {
            log(format!("{what}: done"));
            Ok(format!("{what}: golden brown after {seconds} s"))
        }
        () = call.cancelled() => {
            log(format!("{what}: cancelled, taken out again"));
            Err(Error::new("taken out early"))
        }
    }
}

async fn listen(_: Doorbell, subscribe: Subscribe) -> Result<()> {
    let subscription = subscribe.confirm("You will be notified when it rings.").await?;
    loop {
        subscription.state::<Button>().0.notified().await;
        subscription.send(Event::new("It rang: the postman, with a parcel.").associative()).await?;
    }
}
