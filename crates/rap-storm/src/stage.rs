//! All processes of a run, and the proxies between them.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rap_testkit::postgres;
use rap_testkit::proxy::{Fault, Proxy};
use rap_testkit::{Port, Setup, until};
use tempfile::TempDir;

use crate::disk::Disk;
use crate::faults::Tally;
use crate::server::Server;
use crate::{clients, clock, model, tools, unreliable};

/// Interval at which servers that have ended are started again.
const KEEP: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Database {
    Sqlite,
    Postgres,
}

impl Display for Database {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Database::Sqlite => "SQLite",
            Database::Postgres => "Postgres, two nodes",
        })
    }
}

/// A Postgres server and the proxy in front of it.
pub(crate) struct Postgres {
    /// It is never dropped. Its watcher stops it after this process has ended.
    pub(crate) server: &'static postgres::Server,
    database: postgres::Database<'static>,
    pub(crate) link: Proxy,
    /// Held while the server is stopped or started.
    pub(crate) changing: tokio::sync::Mutex<()>,
}

pub(crate) struct Stage {
    /// URL of the runtime for clients and callbacks.
    pub(crate) url: String,
    pub(crate) nodes: Vec<Server>,
    pub(crate) tools: Server,
    /// Between clients or tool servers and the nodes.
    pub(crate) front: Proxy,
    /// Between the nodes and the tool server.
    pub(crate) tool_link: Proxy,
    pub(crate) postgres: Option<Postgres>,
    pub(crate) disk: Option<Disk>,
    pub(crate) faults: Tally,
    /// Violations that were noticed while faults happened.
    pub(crate) noticed: Mutex<Vec<String>>,
    directory: TempDir,
    _ports: Vec<Port>,
}

impl Stage {
    pub(crate) async fn start(database: Database, seed: u64) -> Arc<Stage> {
        let directory = tempfile::tempdir().unwrap();
        let (data, tool_data) = (directory.path().join("runtime"), directory.path().join("tools"));
        fs::create_dir_all(&data).unwrap();
        let disk = Disk::mount(&data).filter(|_| database == Database::Sqlite);
        if disk.is_none() && database == Database::Sqlite {
            println!("the disk is not filled, because this user cannot mount a file system");
        }
        if clock::library().is_none() {
            println!("no clock jumps, because libfaketime is missing (Debian: apt-get install libfaketime)");
        }
        let nodes = if database == Database::Sqlite { 1 } else { 2 };
        let ports: Vec<Port> = (0..=nodes).map(|_| Port::reserve()).collect();
        let (tool_port, node_ports) = ports.split_first().unwrap();
        let front = Proxy::balance(&node_ports.iter().map(Port::number).collect::<Vec<_>>()).await;
        let tool_link = Proxy::start(tool_port.number()).await;
        let [url, tool_url] = [&front, &tool_link].map(|proxy| format!("http://127.0.0.1:{}", proxy.port));
        let (starts, number, at) = (directory.path().join("starts"), tool_port.number(), tool_url.clone());
        let tools = Server::start("tools", directory.path(), move || {
            tools::command(&tool_data, &starts, number, &at)
        });
        let postgres = if database == Database::Postgres { Some(Postgres::start().await) } else { None };
        let setup = setup(&url, postgres.as_ref())
            .tool_server(&tool_url)
            .tool_server(&unreliable::start(seed).await)
            .model(&model::lines(&model::start(seed).await));
        let rap = Arc::new(setup.prepare(tempfile::tempdir_in(&data).unwrap()));
        let node = |(number, port): (usize, &Port)| {
            let (rap, address) = (Arc::clone(&rap), port.address());
            Server::start(&format!("node{number}"), directory.path(), move || rap.serve_command_on(&address))
        };
        let nodes = node_ports.iter().enumerate().map(node).collect();
        let (faults, noticed) = (Tally::default(), Mutex::default());
        let stage = Arc::new(Stage {
            url,
            nodes,
            tools,
            front,
            tool_link,
            postgres,
            disk,
            faults,
            noticed,
            directory,
            _ports: ports,
        });
        stage.until_ready().await;
        keep(&stage);
        stage
    }

    pub(crate) fn servers(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().chain([&self.tools])
    }

    async fn until_ready(&self) {
        until("the runtime is ready", async || {
            clients::get(&self.url, "/readyz").await.is_some_and(|answer| answer.status == 200)
        })
        .await;
    }

    /// Ends all faults, and waits until the runtime answers.
    pub(crate) async fn recover(&self) {
        for link in
            [&self.front, &self.tool_link].into_iter().chain(self.postgres.as_ref().map(|it| &it.link))
        {
            link.set(Fault::None);
        }
        if let Some(disk) = &self.disk {
            disk.free();
        }
        for clock in self.servers().filter_map(|server| server.clock.as_ref()) {
            clock.set(0);
        }
        self.until_ready().await;
    }

    /// Returns what is wrong with the stage itself: panics, and handlers that started twice.
    pub(crate) async fn check(&self) -> Vec<String> {
        let mut violations: Vec<String> = self.servers().flat_map(Server::panics).collect();
        violations.append(&mut self.noticed.lock().unwrap());
        let starts = fs::read_to_string(self.directory.path().join("starts")).unwrap_or_default();
        let mut once: Vec<&str> = starts.lines().filter(|mark| mark.starts_with("once")).collect();
        once.sort_unstable();
        let twice = once.windows(2).filter(|pair| pair[0] == pair[1]);
        violations.extend(twice.map(|pair| format!("{} is not restartable and started twice", pair[0])));
        for listing in ["calls", "subscriptions", "inbox"] {
            let answer = clients::get(&self.url, &format!("/v1/{listing}")).await;
            let rows = answer
                .as_ref()
                .and_then(|answer| answer.body.as_object()?.values().find_map(|rows| rows.as_array()));
            match rows.map(Vec::len) {
                Some(0) => {}
                found => violations.push(format!("/v1/{listing} has {found:?} rows in the end")),
            }
        }
        violations
    }

    /// Copies everything that helps to explain a violation to a directory that stays. Returns its path.
    pub(crate) fn keep(&self) -> PathBuf {
        let path = std::env::temp_dir().join(format!("rap-storm-{}", std::process::id()));
        std::process::Command::new("cp").arg("-r").arg(self.directory.path()).arg(&path).status().ok();
        path
    }
}

impl Postgres {
    async fn start() -> Postgres {
        let server: &postgres::Server = Box::leak(Box::new(postgres::Server::own()));
        let database = server.database();
        let link = Proxy::start(database.port()).await;
        Postgres { server, database, link, changing: tokio::sync::Mutex::default() }
    }
}

fn setup(url: &str, postgres: Option<&Postgres>) -> Setup {
    let setup = Setup::new()
        .server(&format!("public_url = {url:?}"))
        .limit("wakes_per_hour = \"none\"")
        .limit("events_per_child = 3")
        .limit("discovery_wait = \"2s\"");
    let Some(postgres) = postgres else { return setup };
    let database = postgres.database.url_at(postgres.link.port);
    setup.store(&format!("url = {database:?}\nkey = {:?}\nlease = \"3s\"", "7e".repeat(32)))
}

/// Starts servers that have ended, as long as the stage exists.
fn keep(stage: &Arc<Stage>) {
    let stage = Arc::downgrade(stage);
    tokio::spawn(async move {
        while let Some(stage) = stage.upgrade() {
            stage.servers().for_each(Server::start_if_ended);
            drop(stage);
            tokio::time::sleep(KEEP).await;
        }
    });
}
