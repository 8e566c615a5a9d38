//! Servers with synchronous streaming replication, whose primary can be killed and replaced.

use std::fs;
use std::process::Command;

use super::{SETTINGS, Server, USER, program, run};
use crate::block_until;

/// Names of the replicas.
const REPLICAS: [&str; 2] = ["one", "two"];

/// A primary and two replicas. A commit is acknowledged when one of the replicas has it.
pub struct Cluster {
    primary: Server,
    replicas: [Server; 2],
}

impl Cluster {
    pub fn start() -> Cluster {
        let primary = Server::own();
        let replicas = REPLICAS.map(|name| replica(&primary, name));
        require(&primary, "ANY 1 (one, two)");
        let states =
            "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum' AND state = 'streaming'";
        block_until("both replicas follow", || primary.sql("postgres", states) == "2");
        Cluster { primary, replicas }
    }

    pub fn primary(&self) -> &Server {
        &self.primary
    }

    /// URL of a database of the cluster that leads to whichever server is the primary.
    pub fn url(&self, database: &str) -> String {
        let servers = [&self.primary, &self.replicas[0], &self.replicas[1]];
        let hosts = servers.map(|server| format!("127.0.0.1:{}", server.port)).join(",");
        format!("postgres://{USER}@{hosts}/{database}?sslmode=disable&target_session_attrs=read-write")
    }

    /// Kills the primary.
    pub fn kill_primary(&self) {
        self.primary.kill();
    }

    /// Makes the replica that has received more the primary, and the other one its replica. Returns the new primary.
    pub fn promote(&self) -> &Server {
        let received = |server: &Server| {
            let lsn = "SELECT pg_wal_lsn_diff(pg_last_wal_receive_lsn(), '0/0')";
            server.sql("postgres", lsn).parse::<u64>().unwrap()
        };
        let ahead = usize::from(received(&self.replicas[1]) > received(&self.replicas[0]));
        let (new, other) = (&self.replicas[ahead], &self.replicas[1 - ahead]);
        require(new, &format!("ANY 1 ({})", REPLICAS[1 - ahead]));
        assert_eq!(new.sql("postgres", "SELECT pg_promote(true, 60)"), "t");
        let source = connection(new.port, REPLICAS[1 - ahead]);
        other.sql("postgres", &format!("ALTER SYSTEM SET primary_conninfo = '{source}'"));
        other.sql("postgres", "SELECT pg_reload_conf()");
        new
    }
}

/// Sets the replicas that must have a commit before it is acknowledged.
fn require(server: &Server, names: &str) {
    server.sql("postgres", &format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'"));
    server.sql("postgres", "SELECT pg_reload_conf()");
}

fn connection(port: u16, name: &str) -> String {
    format!("host=127.0.0.1 port={port} user={USER} application_name={name}")
}

fn replica(primary: &Server, name: &str) -> Server {
    Server::own_with(&std::env::temp_dir(), SETTINGS, |data| {
        let mut backup = program("pg_basebackup");
        backup.args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--wal-method=stream", "-D"]);
        run(backup.arg(data).arg("-d").arg(connection(primary.port, name)));
    })
}

impl Server {
    /// Kills all processes of the server at once, as if its machine had lost its power.
    fn kill(&self) {
        let file = fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let mut lines = file.lines();
        let parent = lines.next().unwrap().trim().to_owned();
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
        let mut kill = Command::new("kill");
        kill.arg("-9").arg(&parent).args(children.split_whitespace()).output().unwrap();
        block_until("the server is gone", || std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err());
        // The server leaves a segment of shared memory behind, whose id is in the seventh line.
        if let Some(segment) = lines.nth(5).and_then(|line| line.split_whitespace().nth(1)) {
            Command::new("ipcrm").args(["-m", segment]).output().ok();
        }
    }
}
