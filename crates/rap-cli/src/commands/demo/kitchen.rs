//! The demo's two tool servers: an oven that takes its time, and a doorbell that rings.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rap_tool::prelude::*;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

/// Bakes something. It takes a while.
#[derive(Deserialize, JsonSchema)]
struct Bake {
    /// What to bake.
    what: String,
    /// How long it takes.
    #[schemars(range(min = 0, max = 3600))]
    seconds: f64,
}

/// Tells whenever somebody rings at the door.
#[derive(Deserialize, JsonSchema)]
struct Doorbell {}

/// What the oven tells the storyteller, who stands beside it.
type Telling = mpsc::UnboundedSender<String>;

#[derive(Clone, Default)]
struct Button(Arc<Notify>);

/// The servers at work. They stop when it is dropped.
pub(super) struct Kitchen {
    pub oven_url: String,
    pub doorbell_url: String,
    pub told: mpsc::UnboundedReceiver<String>,
    button: Button,
    servers: Vec<JoinHandle<()>>,
}

impl Kitchen {
    pub(super) async fn open(directory: &Path) -> anyhow::Result<Kitchen> {
        let (telling, told) = mpsc::unbounded_channel::<String>();
        let button = Button::default();
        let oven = ToolServer::new("oven")
            .description("An oven.")
            .offer(Tool::new("bake", bake).long_running())
            .state::<Telling>(telling)
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
        // They end with the process, and there is nothing to finish then.
        let servers = [oven, doorbell].map(|server| tokio::spawn(server.run_until(std::future::pending())));
        Ok(Kitchen { oven_url, doorbell_url, told, button, servers: servers.into() })
    }

    pub(super) fn ring(&self) {
        self.button.0.notify_one();
    }
}

impl Drop for Kitchen {
    fn drop(&mut self) {
        self.servers.iter().for_each(JoinHandle::abort);
    }
}

async fn bake(args: Bake, call: Call) -> Result<String> {
    let Bake { what, seconds } = args;
    let tell = |text: String| {
        // Nobody listens any more when the demo is over.
        call.state::<Telling>().send(text).ok();
    };
    tell(format!("{what}: baking for {seconds} s"));
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs_f64(seconds)) => {
            tell(format!("{what}: done"));
            Ok(format!("{what}: golden brown after {seconds} s"))
        }
        () = call.cancelled() => {
            tell(format!("{what}: cancelled, taken out again"));
            Err(Error::new("taken out early"))
        }
    }
}

async fn listen(_: Doorbell, subscribe: Subscribe) -> Result<()> {
    let subscription = subscribe.confirm("You will be told when it rings.").await?;
    loop {
        subscription.state::<Button>().0.notified().await;
        subscription.send(Event::new("It rang: the postman, with a parcel.").associative()).await?;
    }
}
