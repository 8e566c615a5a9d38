//! Postgres servers for tests. All test processes share one server, each test has a database of its own.
//!
//! A process that uses a server holds a shared lock on a file. When nobody has held it for some seconds, a watcher stops the
//! server and removes its data. So a server ends with its tests, also when they are killed.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use crate::{Port, block_until};

/// User that the server runs as if the tests run as root, which Postgres refuses.
const USER: &str = "postgres";
/// Settings of a server whose data need not survive a power failure.
const SETTINGS: &str = "-c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c full_page_writes=off \
                        -c max_connections=200 -c shared_buffers=64MB -c autovacuum=off";
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
pub struct Server {
    dir: PathBuf,
    port: u16,
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
            Server::open(dir, None)
        })
    }

    /// A server for one test, which may stop and start it.
    pub fn own() -> Server {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        Server::open(dir.path().to_owned(), Some((dir, Port::reserve())))
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

    fn open(dir: PathBuf, own: Option<(TempDir, Port)>) -> Server {
        let lock = File::create(dir.join("lock")).unwrap();
        lock.lock_shared().unwrap();
        let starting = File::create(dir.join("start")).unwrap();
        starting.lock().unwrap();
        let running = fs::read_to_string(dir.join("port")).ok().and_then(|port| port.trim().parse().ok());
        let running = running.filter(|port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_ok());
        let port = running.unwrap_or_else(|| create(&dir, own.as_ref().map(|(_, port)| port.number())));
        Server { dir, port, _lock: lock, own }
    }

    /// Makes an empty database.
    pub fn database(&self) -> Database<'_> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        Database { server: self, name }
    }

    fn sql(&self, database: &str, sql: &str) -> String {
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

    pub fn stop(&self) {
        run(program("pg_ctl").arg("-D").arg(self.dir.join("data")).args(["-m", "immediate", "-w", "stop"]));
    }

    pub fn start(&self) {
        start(&self.dir, self.port);
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
fn create(dir: &Path, port: Option<u16>) -> u16 {
    let data = dir.join("data");
    if data.exists() {
        run(Command::new("rm").arg("-rf").arg(&data));
    }
    fs::create_dir(&data).unwrap();
    if !as_user().is_empty() {
        run(Command::new("chown").arg(USER).arg(&data));
    }
    run(program("initdb").arg("-D").arg(&data).args(["--no-sync", "--auth=trust", "-U", USER, "-E", "UTF8"]));
    // A port that is only free, not reserved, may be taken meanwhile.
    let mut tries = 0;
    let port = loop {
        let port = port.unwrap_or_else(|| Port::reserve().number());
        if try_start(dir, port) {
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

fn try_start(dir: &Path, port: u16) -> bool {
    let mut command = program("pg_ctl");
    command.arg("-D").arg(dir.join("data")).arg("-l").arg(dir.join("data/log")).args(["-w", "-t", "60"]);
    command.arg("-o").arg(format!("{SETTINGS} -c port={port}")).arg("start");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().unwrap().success()
}

fn start(dir: &Path, port: u16) {
    block_until("Postgres starts", || try_start(dir, port));
}

fn log(dir: &Path) -> String {
    fs::read_to_string(dir.join("data/log")).unwrap_or_default()
}

/// A database of one test. It is removed on drop.
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
