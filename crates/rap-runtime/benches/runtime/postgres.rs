//! A Postgres database: `RAP_BENCH=postgres cargo bench -p rap-runtime`.
//!
//! Everything is compared with pgbench on the same server in the same run: one transaction for each step, with the same
//! tables.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rap_runtime::measure::MeasuredStore;
use rap_runtime::model::scripted::Scripted;
use rap_runtime::{Database, Settings};
use rap_testkit::bench::{BenchResult, Figure, Scale};
use rap_testkit::postgres::{self, Database as TestDatabase, Server};
use rap_testkit::proxy::Delay;
use serde_json::json;

use rap_runtime::measure::Sizes;
use rap_runtime::measure::client::{client, open_thread, post_to};
use rap_runtime::measure::process::{BenchProcess, PUBLIC_URL, database, unlimited};
use rap_runtime::measure::trips::take_trips;

/// Time that a round trip to the database takes on a network.
const LATENCY: Duration = Duration::from_micros(500);
/// Number of connections of pgbench.
const CLIENTS: u32 = 8;
/// Numbers of tasks that wake sleeping threads.
const WAKERS: u64 = 64;

/// One step in a transaction of its own, as a store without batches writes it: it locks and reads a head, updates it,
/// and adds two entries and a call, in tables with all indexes of the store.
const STEP: &str = "\\set t random(1, 1000)
BEGIN;
SELECT head FROM threads WHERE no = :t FOR UPDATE;
UPDATE threads SET version = version + 1, updated_at = updated_at + 1, head = head WHERE no = :t;
INSERT INTO entries (session, thread, seq, body) VALUES (:t, :t, nextval('thread_keys'), \
'{\"kind\":\"assistant\",\"text\":\"\",\"calls\":\"' || repeat('x', 150) || '\"}');
INSERT INTO entries (session, thread, seq, body) VALUES (:t, :t, nextval('thread_keys'), \
'{\"kind\":\"result\",\"content\":\"' || repeat('x', 90) || '\"}');
INSERT INTO calls (session, thread, id, state, name, server, seq, since) \
VALUES (:t, :t, 'call' || nextval('thread_keys'), 1, 'echo', 'http://127.0.0.1:9', 1, 1);
COMMIT;
";

fn settings(url: &str) -> Settings {
    let model = Arc::new(Scripted::command_driven());
    Settings {
        public_url: PUBLIC_URL.into(),
        database: Database::Postgres(database(url)),
        limits: unlimited(),
        ..Settings::new("unused.db", model)
    }
}

/// Returns SQL that makes the tables of the store, with all migrations.
fn schema() -> BenchResult<String> {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/postgres");
    let files =
        (1..).map(|number| files.join(format!("schema_{number}.sql"))).take_while(|file| file.exists());
    let mut sql = vec!["CREATE TABLE rap_store (is_one boolean)".to_owned()];
    for file in files {
        sql.push(std::fs::read_to_string(file)?);
    }
    Ok(sql.join("; "))
}

/// Rate of single steps, by pgbench.
fn single_steps(server: &Server, directory: &Path, measured: Duration) -> BenchResult<f64> {
    let database = server.database();
    database.sql(&schema()?);
    database.sql(
        "INSERT INTO threads SELECT n, 'thread' || n, NULL, NULL, n, 0, '[]', n, 'default', NULL, NULL, 0, 0, 1, 'waiting', \
         repeat('x', 500) FROM generate_series(1, 1000) n; SELECT setval('thread_keys', 1000); ANALYZE",
    );
    let script = directory.join("step.sql");
    std::fs::write(&script, STEP)?;
    let seconds = measured.as_secs().max(1).to_string();
    let program = postgres::programs().ok_or("Postgres is not installed")?.join("pgbench");
    let done = std::process::Command::new(program)
        .args(["-n", "-M", "prepared", "-j", "2", "-c", &CLIENTS.to_string(), "-T", &seconds, "-f"])
        .arg(&script)
        .args(["-h", "127.0.0.1", "-U", "postgres", "-p", &database.port().to_string(), database.name()])
        .output()?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let rate = text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
    rate.ok_or_else(|| format!("{text}{}", String::from_utf8_lossy(&done.stderr)).into())
}

/// Steps of the store, without a runtime.
async fn store_alone(server: &Server, threads: usize, sizes: &Sizes) -> BenchResult<Figure> {
    let database = server.database();
    let store = Arc::new(MeasuredStore::open(&settings(&database.url()))?);
    let names: Vec<String> = (0..threads).map(|number| format!("thread{number}")).collect();
    for name in &names {
        store.create(name, Some("hello")).await?;
    }
    let began = Instant::now();
    let steps = store.work(&names, sizes.measured).await?;
    let figure = Figure::of(steps, began.elapsed());
    store.close().await;
    Ok(figure)
}

/// Round trips of whole nodes: callback, commit, question, answer, commit and POST.
async fn round_trips(url: &str, nodes: usize, threads: usize, sizes: &Sizes) -> BenchResult<Figure> {
    let (client, tool) = (client(), BenchProcess::echo()?);
    let nodes: Vec<BenchProcess> = (0..nodes).map(|_| node(url, &tool)).collect::<BenchResult<_>>()?;
    let urls: Vec<&str> = nodes.iter().map(|node| node.url.as_str()).collect();
    post_to(&client, format!("{}/spread", tool.url), json!(urls)).await?;
    for thread in 0..threads {
        open_thread(&client, &nodes[thread % nodes.len()], &format!("thread{thread}"), "go").await?;
    }
    tokio::time::sleep(sizes.warm_up).await;
    take_trips(&client, &tool).await?;
    let began = Instant::now();
    tokio::time::sleep(sizes.measured).await;
    let trips = take_trips(&client, &tool).await?;
    Ok(Figure::of(trips.into_iter().map(|(_, took)| took).collect(), began.elapsed()))
}

/// Cost of steps among many sleeping threads.
struct Sleeping {
    threads: u64,
    figure: Figure,
    /// CPU time of the server for each step.
    cpu: Duration,
    /// Bytes of the tables and indexes for each sleeping thread.
    bytes: f64,
    /// Bytes that the tables, and the log of the server, grow by with each turn.
    turn_bytes: f64,
    turn_log_bytes: f64,
    /// Scans of each table while threads were woken: of the whole table, and by an index.
    scans: Vec<String>,
    /// Plan of the statement that locks the heads of a batch.
    plan: String,
}

/// Numbers of scans of each table: of the whole table, and by an index.
fn scans(database: &TestDatabase<'_>) -> BenchResult<Vec<(String, i64, i64)>> {
    let sql = "SELECT relname || ' ' || coalesce(seq_scan, 0) || ' ' || coalesce(idx_scan, 0) \
               FROM pg_stat_user_tables ORDER BY relname";
    let read = |line: &str| {
        let mut words = line.split(' ');
        let mut next = || words.next().ok_or("a word is missing");
        Ok((next()?.to_owned(), next()?.parse()?, next()?.parse()?))
    };
    database.sql(sql).lines().map(read).collect()
}

async fn sleeping(server: &Server, threads: u64, sizes: &Sizes) -> BenchResult<Sleeping> {
    let database = server.database();
    let store = Arc::new(MeasuredStore::open(&settings(&database.url()))?);
    store.create("sleeper1", None).await?;
    store.wake("sleeper", 1, 1, Duration::from_millis(1)).await?;
    let empty: u64 = database.sql("SELECT pg_database_size(current_database())").parse()?;
    // The others are copies of the first one: idle, with a short history.
    let copy = |table: &str, columns: &str, values: &str| {
        format!(
            "INSERT INTO {table} ({columns}) SELECT {values} FROM {table}, generate_series(2, {threads}) AS n;"
        )
    };
    database.sql(&format!(
        "{}{} SELECT setval('thread_keys', 20000000)",
        copy(
            "threads",
            "no, id, session, inherits, ancestors, incarnation, agent, created_at, updated_at, version, status, head",
            "10000000 + n, 'sleeper' || n, 10000000 + n, inherits, ancestors, n, agent, created_at, updated_at, version, status, head"
        ),
        copy("entries", "thread, session, seq, body", "10000000 + n, 10000000 + n, seq, body"),
    ));
    database.sql("VACUUM ANALYZE");
    database.sql("CHECKPOINT");
    let size =
        || -> BenchResult<u64> { Ok(database.sql("SELECT pg_database_size(current_database())").parse()?) };
    let log = || -> BenchResult<u64> {
        Ok(database.sql("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint").parse()?)
    };
    let before = (size()?, log()?, server.cpu_time(), scans(&database)?);
    let began = Instant::now();
    let steps = store.wake("sleeper", threads, WAKERS, sizes.measured).await?;
    let elapsed = began.elapsed();
    store.close().await;
    let count = steps.len() as f64;
    let cpu = (server.cpu_time() - before.2).div_f64(count);
    let plan = database.sql(
        "EXPLAIN (COSTS off) SELECT t.no, t.version, t.head FROM threads t \
         WHERE t.no = ANY(ARRAY(SELECT 10000000 + n FROM generate_series(2, 65) n)::bigint[]) \
         ORDER BY t.no FOR UPDATE SKIP LOCKED",
    );
    let after = scans(&database)?;
    let scans = before.3.iter().zip(&after).filter(|(before, after)| before != after);
    let scans = scans.map(|((table, whole, indexed), (_, whole_after, indexed_after))| {
        format!("{table} {} and {}", whole_after - whole, indexed_after - indexed)
    });
    let turns = count / 2.0;
    Ok(Sleeping {
        threads,
        cpu,
        bytes: (before.0.saturating_sub(empty)) as f64 / threads as f64,
        turn_bytes: size()?.saturating_sub(before.0) as f64 / turns,
        turn_log_bytes: (log()? - before.1) as f64 / turns,
        scans: scans.collect(),
        plan,
        figure: Figure::of(steps, elapsed),
    })
}

pub async fn measure(scale: Scale, sizes: &Sizes, directory: &Path) -> BenchResult<()> {
    let server = Server::durable(Path::new(env!("CARGO_TARGET_TMPDIR")));
    eprintln!("pgbench …");
    let single = single_steps(&server, directory, sizes.measured)?;
    println!("{:<52} {single:>10.0}", format!("pgbench, one transaction for each step, {CLIENTS} clients"));
    Figure::print_heading();
    let (few, many) = scale.of((64, 1000), (4, 8));
    let mut met = Vec::new();
    eprintln!("the store alone …");
    for (threads, goal) in [(few, 3.0), (scale.of(256, 6), 5.0)] {
        let figure = store_alone(&server, threads, sizes).await?;
        figure.print(&format!("steps of the store alone, {threads} threads"));
        met.push(compare("times pgbench", figure.per_second / single, goal));
    }
    eprintln!("round trips …");
    for (threads, goal) in [(few, 0.6), (many, 0.0)] {
        let trips = async |nodes: usize, delayed: bool| -> BenchResult<f64> {
            let database = server.database();
            let delay = delayed.then(|| Delay::start(database.port(), LATENCY));
            let url = delay.as_ref().map_or_else(|| database.url(), |delay| database.url_at(delay.port));
            let figure = round_trips(&url, nodes, threads, sizes).await?;
            let far = if delayed { ", 0.5 ms to the database" } else { "" };
            figure.print(&format!("round trips, {nodes} nodes, {threads} threads{far}"));
            Ok(figure.per_second)
        };
        let one = trips(1, false).await?;
        met.push(compare("times pgbench", one / single, goal));
        // Rates of one run differ by some percent.
        met.push(compare("times one node", trips(2, false).await? / one, 0.9));
        met.push(compare("times the rate without latency", trips(1, true).await? / one, 0.5));
        trips(2, true).await?;
    }
    let mut cpu = Vec::new();
    for threads in scale.of([1_000, 1_000_000], [10, 100]) {
        eprintln!("{threads} sleeping threads …");
        let sleeping = sleeping(&server, threads, sizes).await?;
        sleeping.print();
        cpu.push(sleeping.cpu.as_secs_f64());
    }
    let ratio = cpu[1] / cpu[0];
    println!("CPU time of a step among many sleeping threads: {ratio:.2} times (at most 1.5)");
    met.push(ratio <= 1.5);
    scale.check(&met)
}

/// Prints a ratio and its goal. Returns whether it is met.
fn compare(what: &str, ratio: f64, goal: f64) -> bool {
    let at_least = if goal > 0.0 { format!(" (at least {goal})") } else { String::new() };
    println!("    {ratio:.2} {what}{at_least}");
    ratio >= goal
}

impl Sleeping {
    fn print(&self) {
        let Sleeping { threads, figure, cpu, bytes, turn_bytes, turn_log_bytes, scans, plan } = self;
        figure.print(&format!("steps among {threads} sleeping threads, any of them"));
        println!(
            "    {cpu:.0?} CPU of the server for each step, {bytes:.0} bytes for each thread; each turn adds {turn_bytes:.0} \
             bytes and {turn_log_bytes:.0} of log"
        );
        println!("    scans of whole tables and by an index: {}", scans.join(", "));
        println!("    plan that locks the heads of a batch:");
        plan.lines().for_each(|line| println!("        {line}"));
    }
}

/// Starts a node. Its script is read before it listens, so its directory can go then.
fn node(url: &str, tool: &BenchProcess) -> BenchResult<BenchProcess> {
    let data = tempfile::tempdir()?;
    BenchProcess::node(url, tool, data.path())
}
