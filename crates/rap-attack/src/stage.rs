//! The servers under attack, the attacker's own servers, and the secrets that nobody may learn.

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use rap_testkit::model::ModelServer;
use rap_testkit::tools::{Call, tool};
use rap_testkit::{Process, Rap, Setup, Tools, poll, programs};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::isolation::Isolation;
use crate::weak;
use crate::wire;

/// Client token of the bystanders.
pub(crate) const BYSTANDER: &str = "s3cret-token-of-bystanders";
/// Client token that the attacker has.
pub(crate) const ATTACKER: &str = "s3cret-token-of-an-attacker";
/// Token of the runtime at the ordinary tool server.
pub(crate) const TOOL: &str = "s3cret-token-of-the-tool-server";
/// Token of another caller of the ordinary tool server.
pub(crate) const CALLER: &str = "s3cret-token-of-another-caller";
/// Token of the runtime at the attacker's tool server. The attacker knows it, but no other origin may.
pub(crate) const HOSTILE: &str = "s3cret-token-of-a-hostile-server";
const MODEL: &str = "sk-s3cret-key-of-the-model";
/// Rate of events that a subscription may send in `rap`, if it can be set.
pub(crate) const EVENTS_PER_SECOND: usize = 100;
/// Time within which an attempt sees what it waits for, on a busy machine too.
pub(crate) const REACHED_WITHIN: Duration = Duration::from_secs(120);
/// Time within which a request has to arrive at the runtime without tokens.
const REQUEST_WITHIN: &str = "request_within = \"2s\"";
/// The default, which the test kit replaces by a longer time.
const DISCOVERY_WAIT: &str = "discovery_wait = \"1s\"";

/// Proxy in front of the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Front {
    None,
    /// A proxy that accepts everything; see [`weak`].
    Weakened,
}

/// A server under attack.
pub(crate) struct Target {
    /// URL at which clients reach it: the proxy's, if there is one.
    pub(crate) url: String,
    server: Server,
    front: Option<Process>,
}

enum Server {
    Runtime(Box<Rap>),
    ToolServer(Process, TempDir),
}

pub(crate) struct Stage {
    /// Runtime with client tokens.
    pub(crate) rap: Target,
    /// Runtime without client tokens, for clients on this machine.
    pub(crate) local: Target,
    /// Ordinary tool server.
    pub(crate) kitchen: Target,
    /// Tool server of the attacker, used by `rap`.
    pub(crate) hostile: Tools,
    /// Tool server of the attacker, used by `local`.
    pub(crate) local_hostile: Tools,
    /// Another server of the attacker, which is not configured anywhere.
    pub(crate) elsewhere: Tools,
    /// Model of the agent `model`; it is the attacker's.
    pub(crate) model: ModelServer,
    pub(crate) isolation: Isolation,
    secrets: Mutex<Vec<String>>,
}

impl Stage {
    /// Starts all servers.
    pub(crate) async fn start(front: Front, isolation: Isolation) -> Stage {
        let (hostile, local_hostile, elsewhere) =
            tokio::join!(Tools::start(), Tools::start(), Tools::start());
        let model = ModelServer::start().await;
        let kitchen = Target::tool_server(&format!("{TOOL},{CALLER}"), front);
        let tokens = format!("tokens = [{BYSTANDER:?}, {ATTACKER:?}]");
        let agent = format!("name = \"model\"\n[agent.model]\n{}", model.lines_with_key(MODEL));
        let setup = Setup::new().server(&tokens).tool_server(&kitchen.process().url).bearer(TOOL);
        let setup = setup.tools(&hostile).bearer(HOSTILE).agent("name = \"default\"").agent(&agent);
        let setup = setup.limit(&format!("events_per_second = {EVENTS_PER_SECOND}")).limit(DISCOVERY_WAIT);
        let rap = Target::runtime(setup, front);
        let setup =
            Setup::new().tools(&local_hostile).bearer(HOSTILE).limit(REQUEST_WITHIN).limit(DISCOVERY_WAIT);
        let local = Target::runtime(setup, front);
        let mut secrets: Vec<String> =
            [BYSTANDER, ATTACKER, TOOL, CALLER, HOSTILE, MODEL].map(str::to_owned).into();
        secrets.extend([&rap, &local, &kitchen].into_iter().filter_map(Target::key));
        let secrets = Mutex::new(secrets);
        Stage { rap, local, kitchen, hostile, local_hostile, elsewhere, model, isolation, secrets }
    }

    /// Undoes the changes of an attempt at the attacker's servers.
    pub(crate) fn reset(&self) {
        for tools in [&self.hostile, &self.local_hostile] {
            tools.offer(tools.document("bench", "1", ["work", "watch"].map(tool).into()));
            tools.release();
        }
    }

    pub(crate) fn targets(&self) -> [&Target; 3] {
        [&self.rap, &self.local, &self.kitchen]
    }

    /// Adds something that no log may contain.
    pub(crate) fn keep_secret(&self, secret: &str) {
        self.secrets.lock().unwrap().push(secret.to_owned());
    }

    pub(crate) fn secrets(&self) -> Vec<String> {
        self.secrets.lock().unwrap().clone()
    }

    /// Creates a thread of the attacker. Returns its id.
    pub(crate) async fn open(&self, message: &str) -> String {
        self.open_with(json!({"message": message})).await
    }

    pub(crate) async fn open_with(&self, body: Value) -> String {
        let made = wire::post(&self.rap.at("/v1/threads"), Some(ATTACKER), &body).await;
        made.expect("a thread could not be created").body["id"]
            .as_str()
            .expect("a thread has an id")
            .to_owned()
    }

    /// Creates a thread of the attacker that calls a tool of the attacker. Returns the invocation.
    pub(crate) async fn call(&self, name: &str) -> Call {
        let thread = self.open(&format!("call {name} {{}}")).await;
        self.invocation(&self.hostile, &thread).await
    }

    /// Waits for an invocation of a thread.
    pub(crate) async fn invocation(&self, tools: &Tools, thread: &str) -> Call {
        loop {
            let call = tools.invocation().await;
            if call.thread() == thread {
                self.keep_secret(call.url().rsplit('/').next().unwrap_or_default());
                return call;
            }
        }
    }

    pub(crate) async fn history(&self, thread: &str) -> String {
        let path = format!("/v1/threads/{thread}/history?limit=1000");
        wire::get(&self.rap.at(&path), Some(ATTACKER)).await.map_or_else(String::new, |answer| answer.text)
    }

    pub(crate) async fn status(&self, thread: &str) -> String {
        let answer = wire::get(&self.rap.at(&format!("/v1/threads/{thread}")), Some(ATTACKER)).await;
        answer.and_then(|answer| answer.body["status"].as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// Waits until a thread of the attacker has one of these statuses.
    pub(crate) async fn until_status(&self, thread: &str, statuses: &[&str]) {
        let reached = poll(REACHED_WITHIN, async || statuses.contains(&self.status(thread).await.as_str()));
        assert!(reached.await.is_some(), "{thread} is {:?}, not {statuses:?}", self.status(thread).await);
    }
}

impl Target {
    fn runtime(setup: Setup, front: Front) -> Target {
        let front = weak::start_before(front);
        let setup = setup.variable("RUST_LOG", "debug");
        let setup = match &front {
            Some((proxy, _)) => setup.server(&format!("public_url = {:?}", proxy.url)),
            None => setup,
        };
        let rap = setup.start();
        Target::new(rap.url.clone(), Server::Runtime(Box::new(rap)), front)
    }

    fn tool_server(callers: &str, front: Front) -> Target {
        let (front, data) = (weak::start_before(front), tempfile::tempdir().unwrap());
        let environment = [("RAP_TOOL_BEARER", callers), ("RUST_LOG", "debug")];
        let process = Process::start(programs::example("kitchen_sink", data.path(), &environment));
        Target::new(process.url.clone(), Server::ToolServer(process, data), front)
    }

    fn new(url: String, server: Server, front: Option<(Process, TempDir)>) -> Target {
        let Some((proxy, shared)) = front else { return Target { url, server, front: None } };
        weak::set_target(shared, &url);
        Target { url: proxy.url.clone(), server, front: Some(proxy) }
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub(crate) fn process(&self) -> &Process {
        match &self.server {
            Server::Runtime(rap) => rap.process(),
            Server::ToolServer(process, _) => process,
        }
    }

    /// All processes whose cost, stop time and logs count.
    pub(crate) fn processes(&self) -> impl Iterator<Item = &Process> {
        [self.process()].into_iter().chain(&self.front)
    }

    /// Directory of its database.
    pub(crate) fn directory(&self) -> &Path {
        match &self.server {
            Server::Runtime(rap) => rap.directory(),
            Server::ToolServer(_, data) => data.path(),
        }
    }

    /// Content of its key file.
    fn key(&self) -> Option<String> {
        let names = ["rap.db.key", "journal.key"];
        let text = names.iter().find_map(|name| std::fs::read_to_string(self.directory().join(name)).ok());
        text.map(|text| text.trim().to_owned())
    }
}
