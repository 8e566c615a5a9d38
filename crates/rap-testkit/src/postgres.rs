//! Postgres servers for tests. All test processes share one server, each test has a database of its own.
//!
//! A process that uses a server holds a shared lock on a file. When nobody has held it for some seconds, a watcher
//! stops the server and removes its data. So a server ends with its tests, even if they are killed.

pub mod replication;

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpStream;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tempfile::TempDir;

use crate::{Port, block_until};

/// User that the server runs as if the tests run as root, which Postgres refuses.
const USER: &str = "postgres";
/// Settings of a server whose data need not survive a power failure.
const SETTINGS: &str = "-c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c full_page_writes=off \
                        -c max_connections=200 -c shared_buffers=64MB -c autovacuum=off -c dynamic_shared_memory_type=mmap";
/// Settings of a server for measurements: commits are as durable as in production.
const DURABLE: &str = "-c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=200 \
                       -c shared_buffers=512MB -c wal_compression=on -c max_wal_size=4GB -c dynamic_shared_memory_type=mmap";
/// Waits until the lock `$1/lock` has been free for three seconds, then runs `$2` while it holds the lock. Without the
/// directory there is no server any more.
const WATCHER: &str = r#"
free=0
while sleep 1 && [ -d "$1" ]; do
    if flock -n -x "$1/lock" true; then free=$((free + 1)); else free=0; fi
    if [ $free -ge 3 ] && flock -n -x "$1/lock" sh -c "$2"; then exit; fi
done
"#;

/// Returns the directory of the server's programs: that of Debian's newest package, or else one in the search path.
pub fn programs() -> Option<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            Some((path.file_name()?.to_str()?.parse().ok()?, path.join("bin")))
        })
        .filter(|(_, path)| path.join("initdb").exists())
        .collect();
    versions.sort();
    let found = versions.pop().map(|(_, path)| path);
    found.or_else(|| {
        std::env::split_paths(&std::env::var_os("PATH")?).find(|path| path.join("initdb").exists())
    })
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n")
}

/// Returns the words before a program so that it does not run as root.
fn as_user() -> &'static [&'static str] {
    static ROOT: OnceLock<bool> = OnceLock::new();
    if *ROOT.get_or_init(is_root) { &["runuser", "-u", USER, "--"] } else { &[] }
}

fn program(name: &str) -> Command {
    let path = programs().expect("Postgres is not installed (Debian: apt-get install postgresql)").join(name);
    let mut words = as_user().iter();
    let Some(first) = words.next() else { return Command::new(path) };
    let mut command = Command::new(first);
    command.args(words).arg(path);
    command
}

fn run(command: &mut Command) -> Output {
    let done = command.stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    done
}

/// A server. Clones of its directory are not possible; processes find it by the directory.
#[derive(Debug)]
pub struct Server {
    dir: PathBuf,
    port: u16,
    settings: &'static str,
    /// Held as long as the server is used.
    _lock: File,
    /// The directory and the port of a server that only this test uses.
    own: Option<(TempDir, Port)>,
}

impl Server {
    /// The server that all tests of the workspace share. It is started if it does not run.
    pub fn shared() -> &'static Server {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(|| {
            let mut hasher = DefaultHasher::new();
            env!("CARGO_MANIFEST_DIR").hash(&mut hasher);
            let dir = std::env::temp_dir().join(format!("rap-postgres-{:016x}", hasher.finish()));
            fs::create_dir_all(&dir).unwrap();
            Server::open(dir, None, SETTINGS, init)
        })
    }

    /// A server for one test, which may stop and start it.
    pub fn own() -> Server {
        Server::own_with(&std::env::temp_dir(), SETTINGS, init)
    }

    /// A server for measurements, in a directory of the disk that is measured. The user that Postgres has instead of root
    /// may not enter that directory; then it is one that everybody can enter.
    pub fn durable(parent: &Path) -> Server {
        let parent = if as_user().is_empty() { parent } else { Path::new("/var/tmp") };
        Server::own_with(parent, DURABLE, init)
    }

    /// A server in a new directory, whose data `init` makes.
    fn own_with(parent: &Path, settings: &'static str, init: impl FnOnce(&Path)) -> Server {
        let dir = tempfile::tempdir_in(parent).unwrap();
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        Server::open(dir.path().to_owned(), Some((dir, Port::reserve())), settings, init)
    }

    /// Makes the server accept TLS. Returns the certificate of the authority that signed the server's, which is only
    /// valid for 127.0.0.1.
    pub fn enable_tls(&self) -> PathBuf {
        let script = "set -e; cd \"$1\"; echo subjectAltName=IP:127.0.0.1 > names; \
             key='-nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1'; \
             openssl req -x509 $key -keyout ca.key -out ca.crt -subj /CN=authority -days 2; \
             openssl req $key -keyout server.key -out server.csr -subj /CN=database; \
             openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 2 -extfile names; \
             chmod 600 server.key";
        let shell = ["sh", "-c", script, "tls"];
        let mut words = as_user().iter().chain(&shell);
        run(Command::new(words.next().unwrap()).args(words).arg(self.dir.join("data")));
        self.sql("postgres", "ALTER SYSTEM SET ssl = on");
        self.sql("postgres", "SELECT pg_reload_conf()");
        let authority = self.dir.join("ca.crt");
        fs::copy(self.dir.join("data/ca.crt"), &authority).unwrap();
        block_until("the server accepts TLS", || self.sql("postgres", "SHOW ssl") == "on");
        authority
    }

    fn open(
        dir: PathBuf,
        own: Option<(TempDir, Port)>,
        settings: &'static str,
        init: impl FnOnce(&Path),
    ) -> Server {
        let lock = File::create(dir.join("lock")).unwrap();
        lock.lock_shared().unwrap();
        let starting = File::create(dir.join("start")).unwrap();
        starting.lock().unwrap();
        let running = fs::read_to_string(dir.join("port")).ok().and_then(|port| port.trim().parse().ok());
        let running = running.filter(|port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_ok());
        let own_port = own.as_ref().map(|(_, port)| port.number());
        let port = running.unwrap_or_else(|| create(&dir, own_port, settings, init));
        Server { dir, port, settings, _lock: lock, own }
    }

    /// Makes an empty database.
    pub fn database(&self) -> Database<'_> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        Database { server: self, name }
    }

    /// Runs SQL in one of its databases. Returns its rows, with `|` between columns.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        let mut psql = program("psql");
        let port = self.port.to_string();
        psql.args([
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-h",
            "127.0.0.1",
            "-U",
            USER,
            "-p",
            &port,
        ]);
        let done = run(psql.args(["-d", database, "-c", sql]));
        String::from_utf8(done.stdout).unwrap().trim_end().to_owned()
    }

    /// Directory of its files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// CPU time that all its processes have used.
    pub fn cpu_time(&self) -> Duration {
        let parent = fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let parent = parent.lines().next().unwrap().trim().to_owned();
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
        // Fields 14 and 15 are hundredths of a second; 16 and 17 are those of children that have ended.
        let ticks = |process: &str, fields: Range<usize>| -> u64 {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let after = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
            after.skip(fields.start).take(fields.len()).filter_map(|field| field.parse::<u64>().ok()).sum()
        };
        let all = children.split_whitespace().map(|child| ticks(child, 11..13)).sum::<u64>();
        Duration::from_millis(10 * (all + ticks(&parent, 11..15)))
    }

    pub fn stop(&self) {
        run(program("pg_ctl").arg("-D").arg(self.dir.join("data")).args(["-m", "immediate", "-w", "stop"]));
    }

    pub fn start(&self) {
        block_until("Postgres starts", || try_start(&self.dir, self.port, self.settings));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.own.is_some() {
            // The watcher stops it if this fails. It may be stopped already.
            program("pg_ctl")
                .arg("-D")
                .arg(self.dir.join("data"))
                .args(["-m", "immediate", "-w", "stop"])
                .output()
                .ok();
        }
    }
}

/// Makes a server in a directory, starts it and its watcher, and returns its port.
fn create(dir: &Path, port: Option<u16>, settings: &str, init: impl FnOnce(&Path)) -> u16 {
    let data = dir.join("data");
    if data.exists() {
        run(Command::new("rm").arg("-rf").arg(&data));
    }
    fs::create_dir(&data).unwrap();
    fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    if !as_user().is_empty() {
        run(Command::new("chown").arg(USER).arg(&data));
    }
    init(&data);
    // A port that is only free, not reserved, may be taken meanwhile.
    let mut tries = 0;
    let port = loop {
        let port = port.unwrap_or_else(|| Port::reserve().number());
        if try_start(dir, port, settings) {
            break port;
        }
        tries += 1;
        assert!(tries < 5, "Postgres does not start: {}", log(dir));
    };
    let stop = format!(
        "{} {}/pg_ctl -D {data} -m immediate stop; rm -rf {data} {port}",
        as_user().join(" "),
        programs().unwrap().display(),
        data = data.display(),
        port = dir.join("port").display()
    );
    let mut watcher = Command::new("setsid");
    watcher.args(["sh", "-c", WATCHER, "watcher"]).arg(dir).arg(stop);
    watcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // It ends by itself, after this process.
    drop(watcher.current_dir("/").spawn().unwrap());
    fs::write(dir.join("port"), port.to_string()).unwrap();
    port
}

fn init(data: &Path) {
    run(program("initdb").arg("-D").arg(data).args(["--no-sync", "--auth=trust", "-U", USER, "-E", "UTF8"]));
}

fn try_start(dir: &Path, port: u16, settings: &str) -> bool {
    let mut command = program("pg_ctl");
    command.arg("-D").arg(dir.join("data")).arg("-l").arg(dir.join("data/log")).args(["-w", "-t", "60"]);
    command.arg("-o").arg(format!("{settings} -c port={port}")).arg("start");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().unwrap().success()
}

fn log(dir: &Path) -> String {
    fs::read_to_string(dir.join("data/log")).unwrap_or_default()
}

/// The pooler pgbouncer in front of a server. It hands out connections by transaction.
pub struct Pooler {
    port: Port,
    _directory: TempDir,
    process: Child,
}

impl Pooler {
    /// Starts a pooler for a server of this machine.
    pub fn start(server: u16) -> Pooler {
        let (directory, port) = (tempfile::tempdir().unwrap(), Port::reserve());
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={server} user={USER}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 20\n",
            port.number()
        );
        let file = directory.path().join("pgbouncer.ini");
        fs::write(&file, settings).unwrap();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut paths = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
        let program = paths.find(|path| path.join("pgbouncer").exists());
        let program = program.expect("pgbouncer is not installed (Debian: apt-get install pgbouncer)");
        let mut command = Command::new(program.join("pgbouncer"));
        if !as_user().is_empty() {
            command.args(["-u", USER]);
        }
        command.arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().unwrap();
        block_until("the pooler listens", || TcpStream::connect(("127.0.0.1", port.number())).is_ok());
        Pooler { port, _directory: directory, process }
    }

    pub fn port(&self) -> u16 {
        self.port.number()
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// A database of one test. It is removed on drop.
#[derive(Debug)]
pub struct Database<'a> {
    server: &'a Server,
    name: String,
}

impl Database<'_> {
    pub fn url(&self) -> String {
        self.url_at(self.server.port)
    }

    /// URL of the database through a proxy on another port.
    pub fn url_at(&self, port: u16) -> String {
        format!("postgres://{USER}@127.0.0.1:{port}/{}?sslmode=disable", self.name)
    }

    /// Name of the database.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// URL of the database with other parameters.
    pub fn url_with(&self, parameters: &str) -> String {
        self.url().replace("sslmode=disable", parameters)
    }

    /// Port of its server.
    pub fn port(&self) -> u16 {
        self.server.port
    }

    /// Runs SQL outside of the store. Returns its rows, with `|` between columns.
    pub fn sql(&self, sql: &str) -> String {
        self.server.sql(&self.name, sql)
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        let mut psql = program("psql");
        let port = self.server.port.to_string();
        // If its server is gone, the database is too.
        psql.args(["-X", "-q", "-h", "127.0.0.1", "-U", USER, "-p", &port, "-d", "postgres", "-c", &sql]);
        psql.stdin(Stdio::null()).output().ok();
    }
}
