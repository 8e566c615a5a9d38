//! Stored forms that every database shares: numbers of states and queues, encrypted questions, and new threads.

use std::sync::Arc;

use rap_agent::{Arguments, CallState, Entry, Head, Item, NewQuestion, Queue, Spawn, texts};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, Timestamp};
use serde_json::{Map, Value, json};

use super::{BoxError, Loaded, NewThread, SessionKey, StoredQuestion, Thread, ThreadKey};

/// Maximum number of stored event ids that one step removes. A step adds at most one.
pub(super) const FORGET_PER_STEP: i64 = 64;
/// Maximum number of threads of a session that are resumed together.
pub(super) const RESUMED: usize = 10_000;
/// Number of retries that one query reads, in addition to those in progress.
pub(super) const RETRY_ROWS: usize = 256;
/// Maximum number of such queries for a page. Each query leaves out the sessions whose share is used up by then.
pub(super) const RETRY_QUERIES: usize = 64;
/// Size at which a page of a listing ends, in bytes.
pub(super) const PAGE_BYTES: usize = 1024 * 1024;
/// Maximum number of delivery records of each kind.
pub(super) const RECORDS: usize = 10_000;
/// Maximum length of the detail of a delivery record, in characters.
pub(super) const DETAIL_CHARS: usize = 500;
/// Maximum number of expired rows that are removed in one transaction.
pub(super) const PRUNED_ROWS: usize = 1_000;

pub(super) fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("bug: stored values can be serialized as JSON")
}

pub(super) fn state_number(state: CallState) -> i64 {
    match state {
        CallState::Open => 0,
        CallState::Returned => 1,
        CallState::Interrupted => 2,
        CallState::Failed => 3,
        CallState::TimedOut => 4,
        CallState::Subscribed => 5,
        CallState::Ended => 6,
    }
}

pub(crate) fn state_from_number(number: i64) -> Option<CallState> {
    Some(match number {
        0 => CallState::Open,
        1 => CallState::Returned,
        2 => CallState::Interrupted,
        3 => CallState::Failed,
        4 => CallState::TimedOut,
        5 => CallState::Subscribed,
        6 => CallState::Ended,
        _ => return None,
    })
}

pub(super) fn queue_number(queue: Queue) -> i64 {
    match queue {
        Queue::UntilBatchCloses => 0,
        Queue::UntilIdle => 1,
    }
}

fn question_context(thread: &Thread, number: u64) -> Vec<u8> {
    [b"question".as_slice(), &thread.incarnation.to_le_bytes(), &number.to_le_bytes()].concat()
}

pub(super) fn encrypt_question(key: &Key, thread: &Thread, number: u64, question: &NewQuestion) -> Vec<u8> {
    let plain = match question {
        NewQuestion::SignIn(url) => json!({"auth_url": url.expose()}),
        NewQuestion::Approval(prompt) => json!({
            "prompt": prompt,
            "choices": texts::APPROVAL_CHOICES,
            "default": texts::REFUSE,
        }),
        NewQuestion::Choice(choice) => json!({
            "prompt": choice.prompt,
            "choices": choice.choices,
            "default": choice.default,
            "response_url": choice.response_url.expose(),
        }),
    };
    key.seal(plain.to_string().as_bytes(), &question_context(thread, number))
}

pub(super) fn decrypt_question(
    key: &Key,
    thread: &Thread,
    number: u64,
    sealed: &[u8],
) -> Result<StoredQuestion, BoxError> {
    let plain = key.open(sealed, &question_context(thread, number))?;
    Ok(serde_json::from_slice(&plain)?)
}

/// Returns the arguments of a call from the assistant entry that made it.
pub(super) fn call_arguments(entry: Entry, call: &CallId) -> Map<String, Value> {
    let Item::Assistant { calls, .. } = entry.item else { return Map::new() };
    let given = calls.into_iter().find(|entry| entry.id == *call).map(|entry| entry.arguments);
    match given {
        Some(Arguments::Given(arguments)) => arguments,
        _ => Map::new(),
    }
}

/// Makes a root thread that is not stored yet.
pub(super) fn new_root(key: ThreadKey, new: &NewThread, now: Timestamp) -> Loaded {
    let thread = Thread {
        key,
        token_key: key,
        id: new.id.clone(),
        session: SessionKey(key),
        parent: None,
        source: None,
        inherits: 0,
        ancestors: Vec::new(),
        incarnation: new.incarnation,
        agent: new.agent.clone(),
        user_id: new.user_id.clone(),
        title: new.title.clone(),
        created_at: now,
    };
    Loaded { thread: Arc::new(thread), head: Head::new(), version: 0 }
}

/// Makes a child that is not stored yet.
pub(super) fn new_child(key: ThreadKey, parent: &Thread, spawn: &Spawn, now: Timestamp) -> Thread {
    let mut ancestors = parent.ancestors.clone();
    ancestors.push(parent.id.clone());
    Thread {
        key,
        token_key: key,
        id: spawn.id.clone(),
        session: parent.session,
        parent: Some(parent.key),
        source: Some(parent.key),
        inherits: spawn.at,
        ancestors,
        incarnation: spawn.incarnation,
        agent: parent.agent.clone(),
        user_id: parent.user_id.clone(),
        title: spawn.head.title().map(str::to_owned),
        created_at: now,
    }
}

/// Makes a root thread that inherits the history of `source` up to a point. It is not stored yet.
pub(super) fn new_fork(
    key: ThreadKey,
    id: rap_protocol::ThreadId,
    incarnation: u64,
    source: &Loaded,
    point: rap_agent::ForkPoint,
    now: Timestamp,
) -> Loaded {
    let title = source.thread.title.clone().or_else(|| source.head.title().map(str::to_owned));
    let source = &source.thread;
    let new =
        NewThread { id, incarnation, agent: source.agent.clone(), user_id: source.user_id.clone(), title };
    let root = new_root(key, &new, now);
    let thread = Thread { source: Some(source.key), inherits: point.at, ..Thread::clone(&root.thread) };
    Loaded { thread: thread.into(), head: point.head(), version: 0 }
}
