//! Forces every case of the writer's rules. A batch is held open by a job that waits on a channel, so that what
//! runs in it does not depend on time.

use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Poll;

use rusqlite::{ErrorCode, ffi};
use tempfile::TempDir;

use super::*;
use crate::sqlite::open_sqlite;

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// A database with a table `t (x UNIQUE)`, and what the tests do to its connections.
struct Fixture {
    dir: TempDir,
    opened: Arc<AtomicUsize>,
    commits: Arc<AtomicUsize>,
    refuse_open: Arc<AtomicBool>,
    refuse_commit: Arc<AtomicBool>,
}

impl Fixture {
    fn new() -> Self {
        let fixture = Fixture {
            dir: tempfile::tempdir().unwrap(),
            opened: Arc::default(),
            commits: Arc::default(),
            refuse_open: Arc::default(),
            refuse_commit: Arc::default(),
        };
        fixture.look().execute_batch("CREATE TABLE t (x UNIQUE)").unwrap();
        fixture
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("db")
    }

    /// Another connection, which sees what is committed.
    fn look(&self) -> Connection {
        open_sqlite(&self.path()).unwrap()
    }

    fn rows(&self) -> Vec<i64> {
        let conn = self.look();
        let mut select = conn.prepare("SELECT x FROM t WHERE typeof(x) = 'integer' ORDER BY rowid").unwrap();
        select.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    fn open(&self) -> impl Fn() -> rusqlite::Result<Connection> + Send + 'static {
        let (path, opened) = (self.path(), Arc::clone(&self.opened));
        let (commits, refuse_commit) = (Arc::clone(&self.commits), Arc::clone(&self.refuse_commit));
        let refuse_open = Arc::clone(&self.refuse_open);
        move || {
            opened.fetch_add(1, Ordering::SeqCst);
            if refuse_open.load(Ordering::SeqCst) {
                return Err(failure(ffi::SQLITE_CANTOPEN));
            }
            open_hooked(&path, Arc::clone(&commits), Arc::clone(&refuse_commit))
        }
    }

    /// A writer whose batches end by count or for want of jobs, never by time.
    fn writer(&self) -> Writer {
        Writer::start(self.open(), timeless()).unwrap()
    }
}

fn open_hooked(
    path: &Path,
    commits: Arc<AtomicUsize>,
    refuse: Arc<AtomicBool>,
) -> rusqlite::Result<Connection> {
    let mut conn = open_sqlite(path)?;
    conn.commit_hook(Some(move || {
        commits.fetch_add(1, Ordering::SeqCst);
        refuse.swap(false, Ordering::SeqCst)
    }))?;
    Ok(conn)
}

fn timeless() -> WriterLimits {
    WriterLimits { batch_time: Duration::from_secs(3600), ..WriterLimits::default() }
}

fn failure(code: i32) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

fn insert(conn: &Connection, x: i64) -> rusqlite::Result<i64> {
    conn.prepare_cached("INSERT INTO t VALUES (?1)")?.execute([x])?;
    Ok(x)
}

/// Queues a job and comes back without its answer.
async fn queue<T: Send + 'static>(
    writer: &Writer,
    lane: Lane,
    job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
) -> Answer<T> {
    let writer = writer.clone();
    let mut answer: Answer<T> = Box::pin(async move { writer.run(lane, job).await });
    assert!(is_pending(&mut answer).await, "answered at once");
    answer
}

async fn add(writer: &Writer, x: i64) -> Answer<i64> {
    queue(writer, Lane::External, move |conn| insert(conn, x)).await
}

async fn is_pending<T>(answer: &mut Answer<T>) -> bool {
    poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_pending())).await
}

/// A job that holds its batch open until it is released.
struct Gate {
    entered: mpsc::Receiver<()>,
    release: mpsc::Sender<()>,
    answer: Answer<()>,
}

impl Gate {
    async fn queue(writer: &Writer) -> Gate {
        let (enter, entered) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let answer = queue(writer, Lane::External, move |_| {
            enter.send(()).unwrap();
            released.recv().unwrap();
            Ok(())
        })
        .await;
        Gate { entered, release, answer }
    }

    /// Queues the gate and waits until it runs: what is queued from now on joins its batch.
    async fn hold(writer: &Writer) -> Gate {
        let gate = Gate::queue(writer).await;
        gate.entered.recv().unwrap();
        gate
    }

    async fn release(self) -> Result<(), Error> {
        self.release.send(()).unwrap();
        self.answer.await
    }
}

#[tokio::test]
async fn every_reply_waits_for_the_commit_refusals_included() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let first = Gate::hold(&writer).await;
    let mut good = add(&writer, 1).await;
    let mut bad = add(&writer, 1).await;
    let mut panics: Answer<()> = queue(&writer, Lane::External, |_| panic!("on purpose")).await;
    let last = Gate::queue(&writer).await;
    first.release.send(()).unwrap();
    last.entered.recv().unwrap();
    // All of them have run, in a batch that is still open.
    assert!(is_pending(&mut good).await);
    assert!(is_pending(&mut bad).await);
    assert!(is_pending(&mut panics).await);
    assert!(fixture.rows().is_empty());
    last.release().await.unwrap();
    assert_eq!(good.await.unwrap(), 1);
    assert!(matches!(bad.await, Err(Error::Sql(_))));
    assert!(matches!(panics.await, Err(Error::Panicked)));
    assert_eq!(fixture.rows(), [1]);
    assert_eq!(fixture.commits.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_job_that_fails_is_rolled_back_alone() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let fails = queue(&writer, Lane::External, |conn| {
        insert(conn, 2)?;
        insert(conn, 1)
    })
    .await;
    let after = add(&writer, 3).await;
    gate.release().await.unwrap();
    before.await.unwrap();
    after.await.unwrap();
    let error = fails.await.unwrap_err();
    assert!(
        matches!(&error, Error::Sql(sql) if sql.sqlite_error_code() == Some(ErrorCode::ConstraintViolation)),
        "{error:?}"
    );
    assert_eq!(fixture.rows(), [1, 3]);
}

#[tokio::test]
async fn a_job_that_panics_is_rolled_back_alone() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let panics: Answer<()> = queue(&writer, Lane::External, |conn| {
        insert(conn, 2)?;
        panic!("on purpose")
    })
    .await;
    let after = add(&writer, 3).await;
    gate.release().await.unwrap();
    before.await.unwrap();
    after.await.unwrap();
    assert!(matches!(panics.await, Err(Error::Panicked)));
    assert_eq!(fixture.rows(), [1, 3]);
}

/// Runs `sql` between two good jobs of one batch; nothing of the batch may stand, and the writer goes on.
async fn check_lost(sql: &'static str, expected: &str) {
    let fixture = Fixture::new();
    fixture.look().execute_batch("INSERT INTO t VALUES (7)").unwrap();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let loses = queue(&writer, Lane::External, move |conn| conn.execute_batch(sql)).await;
    let next_batch = add(&writer, 2).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))), "{sql}");
    assert!(matches!(before.await, Err(Error::Unavailable(_))), "{sql}");
    let error = loses.await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(why) if why.contains(expected)), "{sql}: {error}");
    assert_eq!(next_batch.await.unwrap(), 2, "{sql}");
    assert_eq!(fixture.rows(), [7, 2], "{sql}");
}

#[tokio::test]
async fn a_lost_transaction_fails_its_whole_batch() {
    check_lost("ROLLBACK", "lost: a job ended it").await;
    check_lost("INSERT OR ROLLBACK INTO t VALUES (7)", "lost: UNIQUE constraint").await;
    // A transaction that is not ours is no better than none.
    check_lost("ROLLBACK; BEGIN", "no such savepoint").await;
    // Our savepoint is gone, and with it the way to undo the job.
    check_lost("RELEASE rap_writer_job", "no such savepoint").await;
}

async fn queue_unguarded<T: Send + 'static>(
    writer: &Writer,
    job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
) -> Answer<T> {
    let writer = writer.clone();
    let mut answer: Answer<T> =
        Box::pin(async move { writer.run_unguarded(Lane::External, job, |value| value).await });
    assert!(is_pending(&mut answer).await, "answered at once");
    answer
}

#[tokio::test]
async fn a_job_without_a_savepoint_that_fails_with_nothing_written_fails_alone() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let fails = queue_unguarded(&writer, |conn| insert(conn, 1)).await;
    let stands = queue_unguarded(&writer, |conn| insert(conn, 2)).await;
    gate.release().await.unwrap();
    before.await.unwrap();
    assert!(matches!(fails.await, Err(Error::Sql(_))));
    stands.await.unwrap();
    assert_eq!(fixture.rows(), [1, 2]);
}

#[tokio::test]
async fn a_job_without_a_savepoint_that_fails_after_writing_takes_its_batch_with_it() {
    let fixture = Fixture::new();
    let lost = Arc::new(AtomicUsize::new(0));
    let told = Arc::clone(&lost);
    let on_lost = move || {
        told.fetch_add(1, Ordering::SeqCst);
    };
    let writer = Writer::start_watched(fixture.open(), timeless(), on_lost).unwrap();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let panics: Answer<()> = queue_unguarded(&writer, |conn| {
        insert(conn, 2)?;
        panic!("on purpose")
    })
    .await;
    let seen = Arc::clone(&lost);
    // Whoever runs next finds that the loss was told before.
    let next_batch = queue(&writer, Lane::External, move |_| Ok(seen.load(Ordering::SeqCst))).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
    assert!(matches!(before.await, Err(Error::Unavailable(_))));
    assert!(matches!(panics.await, Err(Error::Unavailable(_))));
    assert_eq!(next_batch.await.unwrap(), 1);
    assert!(fixture.rows().is_empty());
}

#[tokio::test]
async fn a_job_can_not_commit() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    // The writer's own COMMIT is in the statement cache by now.
    writer.run(Lane::External, |conn| insert(conn, 1)).await.unwrap();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 2).await;
    let batch = queue(&writer, Lane::External, |conn| conn.execute_batch("COMMIT")).await;
    let cached =
        queue(&writer, Lane::External, |conn| conn.prepare_cached("COMMIT")?.execute([]).map(|_| ())).await;
    gate.release().await.unwrap();
    assert!(matches!(batch.await, Err(Error::Sql(_))));
    assert!(matches!(cached.await, Err(Error::Sql(_))));
    before.await.unwrap();
    assert_eq!(fixture.commits.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_failed_commit_fails_its_whole_batch() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let good = add(&writer, 1).await;
    let bad = queue(&writer, Lane::External, |_| Err::<(), _>(rusqlite::Error::QueryReturnedNoRows)).await;
    fixture.refuse_commit.store(true, Ordering::SeqCst);
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
    assert!(matches!(good.await, Err(Error::Unavailable(_))));
    assert!(matches!(bad.await, Err(Error::Unavailable(_))));
    assert!(fixture.rows().is_empty());
    assert_eq!(writer.run(Lane::External, |conn| insert(conn, 2)).await.unwrap(), 2);
    assert_eq!(fixture.rows(), [2]);
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_full_disk_is_an_outage_that_ends_when_there_is_room() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    writer.run(Lane::Internal, |conn| conn.pragma_update(None, "max_page_count", 8)).await.unwrap();
    let large = |conn: &Connection| conn.execute("INSERT INTO t VALUES (zeroblob(1000000))", []);
    for _ in 0..2 {
        let refused = writer.run(Lane::External, large).await;
        assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("full")), "{refused:?}");
    }
    // What still fits is still written.
    writer.run(Lane::External, |conn| insert(conn, 1)).await.unwrap();
    writer.run(Lane::Internal, |conn| conn.pragma_update(None, "max_page_count", 1_000_000)).await.unwrap();
    assert_eq!(writer.run(Lane::External, large).await.unwrap(), 1);
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_outage_that_leaves_the_transaction_whole_fails_one_job() {
    for code in [ffi::SQLITE_FULL, ffi::SQLITE_NOMEM, ffi::SQLITE_BUSY] {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        let gate = Gate::hold(&writer).await;
        let fails = queue(&writer, Lane::External, move |conn| {
            insert(conn, 1)?;
            Err::<(), _>(failure(code))
        })
        .await;
        let after = add(&writer, 2).await;
        gate.release().await.unwrap();
        assert!(matches!(fails.await, Err(Error::Unavailable(_))));
        after.await.unwrap();
        assert_eq!(fixture.rows(), [2]);
    }
}

#[tokio::test]
async fn after_an_io_error_the_database_is_opened_again() {
    let codes = [
        ffi::SQLITE_IOERR,
        ffi::SQLITE_CORRUPT,
        ffi::SQLITE_NOTADB,
        ffi::SQLITE_CANTOPEN,
        ffi::SQLITE_READONLY,
    ];
    for code in codes {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        let gate = Gate::hold(&writer).await;
        let before = add(&writer, 1).await;
        let broke = queue(&writer, Lane::External, move |_| Err::<(), _>(failure(code))).await;
        let next_batch = add(&writer, 2).await;
        assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
        assert!(matches!(before.await, Err(Error::Unavailable(_))));
        assert!(matches!(broke.await, Err(Error::Unavailable(_))));
        assert_eq!(next_batch.await.unwrap(), 2);
        assert_eq!(fixture.rows(), [2]);
        assert_eq!(fixture.opened.load(Ordering::SeqCst), 2);
    }
}

#[tokio::test]
async fn a_database_that_can_not_be_opened_is_tried_once_a_batch() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let broke = queue(&writer, Lane::External, |_| Err::<(), _>(failure(ffi::SQLITE_IOERR))).await;
    let waiting = [add(&writer, 1).await, add(&writer, 2).await, add(&writer, 3).await];
    fixture.refuse_open.store(true, Ordering::SeqCst);
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
    assert!(matches!(broke.await, Err(Error::Unavailable(_))));
    for answer in waiting {
        assert!(matches!(answer.await, Err(Error::Unavailable(_))));
    }
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 2, "three that waited cost one attempt");
    assert!(matches!(writer.run(Lane::External, |conn| insert(conn, 4)).await, Err(Error::Unavailable(_))));
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 3);
    fixture.refuse_open.store(false, Ordering::SeqCst);
    assert_eq!(writer.run(Lane::External, |conn| insert(conn, 5)).await.unwrap(), 5);
    assert_eq!(fixture.rows(), [5]);
}

#[tokio::test]
async fn a_database_that_another_process_writes_is_an_outage() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let other = fixture.look();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let refused = writer.run(Lane::External, |conn| insert(conn, 1)).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("locked")), "{refused:?}");
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(writer.run(Lane::External, |conn| insert(conn, 2)).await.unwrap(), 2);
    assert_eq!(fixture.rows(), [2]);
}

#[tokio::test]
async fn a_savepoint_that_a_job_leaves_open_ends_with_the_job() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let kept = queue(&writer, Lane::External, |conn| {
        conn.execute_batch("SAVEPOINT mine")?;
        insert(conn, 1)
    })
    .await;
    let undone = queue(&writer, Lane::External, |conn| {
        conn.execute_batch("SAVEPOINT mine")?;
        insert(conn, 2)?;
        insert(conn, 1)
    })
    .await;
    let after = add(&writer, 3).await;
    let gone = queue(&writer, Lane::External, |conn| conn.execute_batch("RELEASE mine")).await;
    gate.release().await.unwrap();
    kept.await.unwrap();
    assert!(matches!(undone.await, Err(Error::Sql(_))));
    after.await.unwrap();
    assert!(matches!(gone.await, Err(Error::Sql(_))));
    assert_eq!(fixture.rows(), [1, 3]);
}

#[tokio::test]
async fn internal_jobs_go_first_and_only_external_ones_are_refused() {
    let fixture = Fixture::new();
    let writer = Writer::start(fixture.open(), WriterLimits { queue: 2, ..timeless() }).unwrap();
    let gate = Gate::hold(&writer).await;
    let external = [add(&writer, 1).await, add(&writer, 2).await];
    assert!(matches!(writer.run(Lane::External, |conn| insert(conn, 3)).await, Err(Error::Busy)));
    let mut internal = Vec::new();
    for x in 10..14 {
        internal.push(queue(&writer, Lane::Internal, move |conn| insert(conn, x)).await);
    }
    gate.release().await.unwrap();
    for answer in internal.into_iter().chain(external) {
        answer.await.unwrap();
    }
    assert_eq!(fixture.rows(), [10, 11, 12, 13, 1, 2]);
}

#[tokio::test]
async fn internal_jobs_past_their_bound_wait_and_are_not_refused() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let more = INTERNAL_JOBS as i64 + 8;
    let mut answers = Vec::new();
    for x in 0..more {
        answers.push(queue(&writer, Lane::Internal, move |conn| insert(conn, x)).await);
    }
    assert_eq!(writer.inner.internal.available_permits(), 0);
    gate.release().await.unwrap();
    for (x, answer) in (0..).zip(answers) {
        assert_eq!(answer.await.unwrap(), x);
    }
    assert_eq!(fixture.rows(), (0..more).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_jobs_share_commits() {
    let fixture = Fixture::new();
    let writer = Writer::start(fixture.open(), WriterLimits::default()).unwrap();
    let gate = Gate::hold(&writer).await;
    let mut answers = Vec::new();
    for x in 0..64 {
        answers.push(add(&writer, x).await);
    }
    gate.release().await.unwrap();
    for answer in answers {
        answer.await.unwrap();
    }
    let commits = fixture.commits.load(Ordering::SeqCst);
    assert!(commits <= 16, "64 jobs took {commits} commits");
    assert_eq!(fixture.rows().len(), 64);
}

#[tokio::test]
async fn a_batch_is_bounded_by_count_and_by_time() {
    let table = [
        (WriterLimits { batch_jobs: 4, ..timeless() }, 3), // the gate and 3, then 4, then 2
        (WriterLimits { batch_time: Duration::ZERO, ..WriterLimits::default() }, 10),
    ];
    for (limits, expected) in table {
        let fixture = Fixture::new();
        let writer = Writer::start(fixture.open(), limits).unwrap();
        let gate = Gate::hold(&writer).await;
        let mut answers = Vec::new();
        for x in 0..9 {
            answers.push(add(&writer, x).await);
        }
        gate.release().await.unwrap();
        for answer in answers {
            answer.await.unwrap();
        }
        assert_eq!(fixture.commits.load(Ordering::SeqCst), expected, "{limits:?}");
    }
}

#[tokio::test]
async fn a_caller_that_leaves_does_not_stop_its_job() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    drop(add(&writer, 1).await);
    gate.release().await.unwrap();
    writer.close().await;
    assert_eq!(fixture.rows(), [1]);
}

#[tokio::test]
async fn closing_finishes_what_is_queued_and_refuses_the_rest() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let queued = add(&writer, 1).await;
    let closing = {
        let writer = writer.clone();
        let mut closing: Answer<()> = Box::pin(async move {
            writer.close().await;
            Ok(())
        });
        assert!(is_pending(&mut closing).await);
        closing
    };
    for lane in [Lane::Internal, Lane::External] {
        assert!(matches!(writer.run(lane, |conn| insert(conn, 2)).await, Err(Error::Closed)));
    }
    gate.release().await.unwrap();
    closing.await.unwrap();
    assert_eq!(queued.await.unwrap(), 1);
    assert_eq!(fixture.rows(), [1]);
    // The connection is closed: nothing of the log is left.
    assert!(!fixture.dir.path().join("db-wal").exists());
    writer.close().await;
}

/// Says when the thread's `open` is dropped, which is when the thread ends.
struct Tell(mpsc::Sender<()>);

impl Drop for Tell {
    fn drop(&mut self) {
        self.0.send(()).unwrap();
    }
}

fn telling(open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static) -> (Writer, mpsc::Receiver<()>) {
    let (tell, told) = mpsc::channel();
    let tell = Tell(tell);
    let open = move || {
        let _owned = &tell;
        open()
    };
    (Writer::start(open, timeless()).unwrap(), told)
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_thread_after_its_work() {
    let fixture = Fixture::new();
    let (writer, told) = telling(fixture.open());
    let gate = Gate::hold(&writer).await;
    let queued = add(&writer, 1).await;
    gate.release.send(()).unwrap();
    drop((gate, queued, writer));
    told.recv().unwrap();
    assert_eq!(fixture.rows(), [1]);
}

/// Panics when it is dropped, outside of any job.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[tokio::test]
async fn nobody_waits_for_a_thread_that_broke() {
    let fixture = Fixture::new();
    let (writer, told) = telling(fixture.open());
    let gate = Gate::hold(&writer).await;
    drop(queue(&writer, Lane::External, |_| Ok(Bomb)).await);
    let behind = add(&writer, 1).await;
    gate.release().await.unwrap();
    told.recv().unwrap();
    assert!(matches!(behind.await, Err(Error::Closed)));
    assert!(matches!(writer.run(Lane::External, |conn| insert(conn, 2)).await, Err(Error::Closed)));
    writer.close().await;
}

#[test]
fn a_database_that_can_not_be_opened_at_the_start_is_an_error() {
    let refused = Writer::start(|| Err(failure(ffi::SQLITE_CANTOPEN)), WriterLimits::default());
    assert!(matches!(refused.err(), Some(Error::Unavailable(_))));
}
