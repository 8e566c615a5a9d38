//! What a handler knows about its call.

use std::fmt;
use std::sync::Arc;

use rap_protocol::{CallId, ThreadId, UserId};

use crate::engine::{Engine, Run};
use crate::journal::Seq;

/// One call of a tool, in the hands of its handler. Clones are the same call.
#[derive(Clone)]
pub struct Call {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Arc<Engine>,
    run: Arc<Run>,
    seq: Seq,
    id: CallId,
    thread: Thread,
    ancestors: Vec<ThreadId>,
    user_id: Option<UserId>,
}

/// A conversation thread, as a tool server sees it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Thread {
    id: ThreadId,
    key: Box<str>,
}

impl Thread {
    pub(crate) fn new(id: ThreadId, key: String) -> Self {
        Thread { id, key: key.into() }
    }

    /// The id that the runtime gave it. It is untrusted: never put it into a path, a query or a command.
    pub fn id(&self) -> &ThreadId {
        &self.id
    }

    /// 32 hexadecimal digits that stand for this thread of this caller. Two callers that use the same id have
    /// different keys. It is safe in a file name, and the right name for what belongs to the thread.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Debug for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Thread({:?})", self.id)
    }
}

impl Call {
    pub(crate) fn new(
        engine: Arc<Engine>,
        run: Arc<Run>,
        thread: Thread,
        stored: &mut crate::journal::StoredCall,
    ) -> Self {
        let inner = Inner {
            engine,
            run,
            seq: stored.seq,
            id: stored.id.clone(),
            thread,
            ancestors: std::mem::take(&mut stored.ancestors),
            user_id: stored.user_id.take(),
        };
        Call { inner: Arc::new(inner) }
    }

    /// The id of the call.
    pub fn id(&self) -> &CallId {
        &self.inner.id
    }

    /// The thread that it belongs to.
    pub fn thread(&self) -> &Thread {
        &self.inner.thread
    }

    /// The ancestors of the thread, root first; none for a root thread.
    pub fn ancestors(&self) -> &[ThreadId] {
        &self.inner.ancestors
    }

    /// The end user on whose behalf the call is made, where the runtime says so.
    pub fn user_id(&self) -> Option<&UserId> {
        self.inner.user_id.as_ref()
    }

    /// Resolves when nobody waits for the result any more: the call was cancelled, or its thread closed. The
    /// handler then has a grace time, 5 seconds by default, before it is dropped where it stands.
    pub async fn cancelled(&self) {
        self.inner.run.stop.cancelled().await;
    }

    /// Whether [`Call::cancelled`] has come.
    pub fn is_cancelled(&self) -> bool {
        self.inner.run.stop.is_cancelled()
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.inner.engine
    }

    pub(crate) fn run(&self) -> &Run {
        &self.inner.run
    }

    pub(crate) fn seq(&self) -> Seq {
        self.inner.seq
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({:?} of {:?})", self.inner.id, self.inner.thread)
    }
}
