//! Tests of every case of the writer's rules. A job that waits on a channel holds a batch open, so that the content
//! of the batch does not depend on timing.

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

/// A database with a table `t (x UNIQUE)`, with counters and fault injection for its connections.
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
        fixture.connection().execute_batch("CREATE TABLE t (x UNIQUE)").unwrap();
        fixture
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("db")
    }

    /// A separate connection, which sees only committed data.
    fn connection(&self) -> Connection {
        open_sqlite(&self.path()).unwrap()
    }

    fn rows(&self) -> Vec<i64> {
        let conn = self.connection();
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

    /// A writer whose batches end by number of jobs or when the queue is empty, never by time.
    fn writer(&self) -> Writer {
        Writer::start(self.open(), without_batch_time()).unwrap()
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

fn without_batch_time() -> WriterLimits {
    WriterLimits { batch_time: Duration::from_secs(3600), ..WriterLimits::default() }
}

fn failure(code: i32) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

fn insert(conn: &Connection, x: i64) -> rusqlite::Result<i64> {
    conn.prepare_cached("INSERT INTO t VALUES (?1)")?.execute([x])?;
    Ok(x)
}

/// Queues a job and returns without waiting for its result.
async fn queue<T: Send + 'static>(
    writer: &Writer,
    class: JobClass,
    job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
) -> Answer<T> {
    let writer = writer.clone();
    let mut answer: Answer<T> = Box::pin(async move { writer.run(class, job).await });
    assert!(is_pending(&mut answer).await, "answered at once");
    answer
}

async fn add(writer: &Writer, x: i64) -> Answer<i64> {
    queue(writer, JobClass::External, move |conn| insert(conn, x)).await
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
        let answer = queue(writer, JobClass::External, move |_| {
            enter.send(()).unwrap();
            released.recv().unwrap();
            Ok(())
        })
        .await;
        Gate { entered, release, answer }
    }

    /// Queues the gate and waits until it runs. Jobs that are queued from now on join its batch.
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
async fn every_result_is_sent_after_the_commit_also_errors() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let first = Gate::hold(&writer).await;
    let mut good = add(&writer, 1).await;
    let mut bad = add(&writer, 1).await;
    let mut panics: Answer<()> = queue(&writer, JobClass::External, |_| panic!("on purpose")).await;
    let last = Gate::queue(&writer).await;
    first.release.send(()).unwrap();
    last.entered.recv().unwrap();
    // All of them have run, and the batch is still open.
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
    let fails = queue(&writer, JobClass::External, |conn| {
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
    let panics: Answer<()> = queue(&writer, JobClass::External, |conn| {
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

/// Runs `sql` between two good jobs of one batch. The whole batch must be rolled back, and the writer must continue.
async fn check_batch_fails(sql: &'static str, expected: &str) {
    let fixture = Fixture::new();
    fixture.connection().execute_batch("INSERT INTO t VALUES (7)").unwrap();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let loses = queue(&writer, JobClass::External, move |conn| conn.execute_batch(sql)).await;
    let next_batch = add(&writer, 2).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))), "{sql}");
    assert!(matches!(before.await, Err(Error::Unavailable(_))), "{sql}");
    let error = loses.await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable(why) if why.contains(expected)), "{sql}: {error}");
    assert_eq!(next_batch.await.unwrap(), 2, "{sql}");
    assert_eq!(fixture.rows(), [7, 2], "{sql}");
}

#[tokio::test]
async fn a_batch_whose_transaction_was_ended_by_a_job_fails() {
    check_batch_fails("ROLLBACK", "lost: a job ended it").await;
    check_batch_fails("INSERT OR ROLLBACK INTO t VALUES (7)", "lost: UNIQUE constraint").await;
    // A transaction that the job has begun does not count.
    check_batch_fails("ROLLBACK; BEGIN", "no such savepoint").await;
    // Without the savepoint, the job cannot be rolled back.
    check_batch_fails("RELEASE rap_writer_job", "no such savepoint").await;
}

async fn queue_unguarded<T: Send + 'static>(
    writer: &Writer,
    job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
) -> Answer<T> {
    let writer = writer.clone();
    let mut answer: Answer<T> =
        Box::pin(async move { writer.run_unguarded(JobClass::External, job, |value| value).await });
    assert!(is_pending(&mut answer).await, "answered at once");
    answer
}

#[tokio::test]
async fn a_job_without_a_savepoint_that_fails_before_writing_fails_alone() {
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
async fn a_job_without_a_savepoint_that_fails_after_writing_fails_its_whole_batch() {
    let fixture = Fixture::new();
    let failed_batches = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&failed_batches);
    let on_batch_failed = move || {
        counter.fetch_add(1, Ordering::SeqCst);
    };
    let writer =
        Writer::start_with_failure_hook(fixture.open(), without_batch_time(), on_batch_failed).unwrap();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 1).await;
    let panics: Answer<()> = queue_unguarded(&writer, |conn| {
        insert(conn, 2)?;
        panic!("on purpose")
    })
    .await;
    let seen = Arc::clone(&failed_batches);
    // The hook was called before the next job runs.
    let next_batch = queue(&writer, JobClass::External, move |_| Ok(seen.load(Ordering::SeqCst))).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
    assert!(matches!(before.await, Err(Error::Unavailable(_))));
    assert!(matches!(panics.await, Err(Error::Unavailable(_))));
    assert_eq!(next_batch.await.unwrap(), 1);
    assert!(fixture.rows().is_empty());
}

#[tokio::test]
async fn a_job_cannot_commit() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    // The writer's own COMMIT is in the statement cache by now.
    writer.run(JobClass::External, |conn| insert(conn, 1)).await.unwrap();
    let gate = Gate::hold(&writer).await;
    let before = add(&writer, 2).await;
    let batch = queue(&writer, JobClass::External, |conn| conn.execute_batch("COMMIT")).await;
    let cached =
        queue(&writer, JobClass::External, |conn| conn.prepare_cached("COMMIT")?.execute([]).map(|_| ()))
            .await;
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
    let bad =
        queue(&writer, JobClass::External, |_| Err::<(), _>(rusqlite::Error::QueryReturnedNoRows)).await;
    fixture.refuse_commit.store(true, Ordering::SeqCst);
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
    assert!(matches!(good.await, Err(Error::Unavailable(_))));
    assert!(matches!(bad.await, Err(Error::Unavailable(_))));
    assert!(fixture.rows().is_empty());
    assert_eq!(writer.run(JobClass::External, |conn| insert(conn, 2)).await.unwrap(), 2);
    assert_eq!(fixture.rows(), [2]);
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_full_disk_is_an_outage_that_ends_when_there_is_room() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    writer.run(JobClass::Internal, |conn| conn.pragma_update(None, "max_page_count", 8)).await.unwrap();
    let large = |conn: &Connection| conn.execute("INSERT INTO t VALUES (zeroblob(1000000))", []);
    for _ in 0..2 {
        let refused = writer.run(JobClass::External, large).await;
        assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("full")), "{refused:?}");
    }
    // A small row still fits.
    writer.run(JobClass::External, |conn| insert(conn, 1)).await.unwrap();
    writer
        .run(JobClass::Internal, |conn| conn.pragma_update(None, "max_page_count", 1_000_000))
        .await
        .unwrap();
    assert_eq!(writer.run(JobClass::External, large).await.unwrap(), 1);
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_outage_that_keeps_the_transaction_intact_fails_one_job() {
    for code in [ffi::SQLITE_FULL, ffi::SQLITE_NOMEM, ffi::SQLITE_BUSY] {
        let fixture = Fixture::new();
        let writer = fixture.writer();
        let gate = Gate::hold(&writer).await;
        let fails = queue(&writer, JobClass::External, move |conn| {
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
        let broke = queue(&writer, JobClass::External, move |_| Err::<(), _>(failure(code))).await;
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
async fn a_database_that_cannot_be_opened_is_tried_once_per_batch() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let broke = queue(&writer, JobClass::External, |_| Err::<(), _>(failure(ffi::SQLITE_IOERR))).await;
    let waiting = [add(&writer, 1).await, add(&writer, 2).await, add(&writer, 3).await];
    fixture.refuse_open.store(true, Ordering::SeqCst);
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))));
    assert!(matches!(broke.await, Err(Error::Unavailable(_))));
    for answer in waiting {
        assert!(matches!(answer.await, Err(Error::Unavailable(_))));
    }
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 2, "one attempt for three waiting jobs");
    assert!(matches!(
        writer.run(JobClass::External, |conn| insert(conn, 4)).await,
        Err(Error::Unavailable(_))
    ));
    assert_eq!(fixture.opened.load(Ordering::SeqCst), 3);
    fixture.refuse_open.store(false, Ordering::SeqCst);
    assert_eq!(writer.run(JobClass::External, |conn| insert(conn, 5)).await.unwrap(), 5);
    assert_eq!(fixture.rows(), [5]);
}

#[tokio::test]
async fn a_database_that_another_process_has_locked_is_an_outage() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let other = fixture.connection();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let refused = writer.run(JobClass::External, |conn| insert(conn, 1)).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("locked")), "{refused:?}");
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(writer.run(JobClass::External, |conn| insert(conn, 2)).await.unwrap(), 2);
    assert_eq!(fixture.rows(), [2]);
}

#[tokio::test]
async fn a_savepoint_that_a_job_leaves_open_is_released() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let kept = queue(&writer, JobClass::External, |conn| {
        conn.execute_batch("SAVEPOINT mine")?;
        insert(conn, 1)
    })
    .await;
    let undone = queue(&writer, JobClass::External, |conn| {
        conn.execute_batch("SAVEPOINT mine")?;
        insert(conn, 2)?;
        insert(conn, 1)
    })
    .await;
    let after = add(&writer, 3).await;
    let gone = queue(&writer, JobClass::External, |conn| conn.execute_batch("RELEASE mine")).await;
    gate.release().await.unwrap();
    kept.await.unwrap();
    assert!(matches!(undone.await, Err(Error::Sql(_))));
    after.await.unwrap();
    assert!(matches!(gone.await, Err(Error::Sql(_))));
    assert_eq!(fixture.rows(), [1, 3]);
}

#[tokio::test]
async fn internal_jobs_run_first_and_only_external_ones_are_refused() {
    let fixture = Fixture::new();
    let writer = Writer::start(fixture.open(), WriterLimits { queue: 2, ..without_batch_time() }).unwrap();
    let gate = Gate::hold(&writer).await;
    let external = [add(&writer, 1).await, add(&writer, 2).await];
    assert!(matches!(writer.run(JobClass::External, |conn| insert(conn, 3)).await, Err(Error::Busy)));
    let mut internal = Vec::new();
    for x in 10..14 {
        internal.push(queue(&writer, JobClass::Internal, move |conn| insert(conn, x)).await);
    }
    gate.release().await.unwrap();
    for answer in internal.into_iter().chain(external) {
        answer.await.unwrap();
    }
    assert_eq!(fixture.rows(), [10, 11, 12, 13, 1, 2]);
}

#[tokio::test]
async fn internal_jobs_above_the_limit_wait_and_are_not_refused() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    let more = INTERNAL_JOBS as i64 + 8;
    let mut answers = Vec::new();
    for x in 0..more {
        answers.push(queue(&writer, JobClass::Internal, move |conn| insert(conn, x)).await);
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
async fn a_batch_is_limited_by_number_and_by_time() {
    let table = [
        (WriterLimits { batch_jobs: 4, ..without_batch_time() }, 3), // the gate and 3, then 4, then 2
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
async fn dropping_the_future_does_not_stop_the_job() {
    let fixture = Fixture::new();
    let writer = fixture.writer();
    let gate = Gate::hold(&writer).await;
    drop(add(&writer, 1).await);
    gate.release().await.unwrap();
    writer.close().await;
    assert_eq!(fixture.rows(), [1]);
}

#[tokio::test]
async fn closing_runs_queued_jobs_and_refuses_new_ones() {
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
    for class in [JobClass::Internal, JobClass::External] {
        assert!(matches!(writer.run(class, |conn| insert(conn, 2)).await, Err(Error::Closed)));
    }
    gate.release().await.unwrap();
    closing.await.unwrap();
    assert_eq!(queued.await.unwrap(), 1);
    assert_eq!(fixture.rows(), [1]);
    // The connection is closed, so the write-ahead log is gone.
    assert!(!fixture.dir.path().join("db-wal").exists());
    writer.close().await;
}

/// Notifies the test when the thread's `open` is dropped, which happens when the thread ends.
struct NotifyOnDrop(mpsc::Sender<()>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.send(()).unwrap();
    }
}

fn start_with_exit_signal(
    open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
) -> (Writer, mpsc::Receiver<()>) {
    let (ended, exit) = mpsc::channel();
    let ended = NotifyOnDrop(ended);
    let open = move || {
        let _owned = &ended;
        open()
    };
    (Writer::start(open, without_batch_time()).unwrap(), exit)
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_thread_after_its_work() {
    let fixture = Fixture::new();
    let (writer, exit) = start_with_exit_signal(fixture.open());
    let gate = Gate::hold(&writer).await;
    let queued = add(&writer, 1).await;
    gate.release.send(()).unwrap();
    drop((gate, queued, writer));
    exit.recv().unwrap();
    assert_eq!(fixture.rows(), [1]);
}

/// Panics when it is dropped, outside of any job.
struct PanicOnDrop;

impl Drop for PanicOnDrop {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[tokio::test]
async fn callers_get_an_error_when_the_thread_has_panicked() {
    let fixture = Fixture::new();
    let (writer, exit) = start_with_exit_signal(fixture.open());
    let gate = Gate::hold(&writer).await;
    drop(queue(&writer, JobClass::External, |_| Ok(PanicOnDrop)).await);
    let behind = add(&writer, 1).await;
    gate.release().await.unwrap();
    exit.recv().unwrap();
    assert!(matches!(behind.await, Err(Error::Closed)));
    assert!(matches!(writer.run(JobClass::External, |conn| insert(conn, 2)).await, Err(Error::Closed)));
    writer.close().await;
}

#[test]
fn a_database_that_cannot_be_opened_at_the_start_is_an_error() {
    let refused = Writer::start(|| Err(failure(ffi::SQLITE_CANTOPEN)), WriterLimits::default());
    assert!(matches!(refused.err(), Some(Error::Unavailable(_))));
}
