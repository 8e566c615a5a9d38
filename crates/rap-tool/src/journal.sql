-- What a tool server remembers. `state`: 0 running, 1 subscribed, 2 ending, 3 settled.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;

-- A closing is remembered for as long as calls of its thread are.
CREATE TABLE closings (
    thread_key BLOB PRIMARY KEY,
    caller     BLOB NOT NULL,
    thread     TEXT NOT NULL,
    last_call  INTEGER NOT NULL,        -- later calls have opened the thread again
    pending    INTEGER NOT NULL,        -- what belongs to the thread has not been cleared away yet
    closed_at  INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX closings_by_age ON closings (closed_at);

CREATE TABLE calls (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    key          BLOB NOT NULL,         -- see `Identity`: begins with the thread's, then the call's
    caller       BLOB NOT NULL,
    thread       TEXT NOT NULL,
    call_id      TEXT NOT NULL,
    secondary_id TEXT,
    operation    TEXT NOT NULL,
    arguments    TEXT,                  -- dropped when the call is settled, like all below that is sensitive
    callback     BLOB,                  -- sealed
    origin       INTEGER NOT NULL,      -- which host the callback goes to, hashed
    user_id      TEXT,
    ancestors    TEXT,
    state        INTEGER NOT NULL,
    subscription INTEGER NOT NULL DEFAULT 0,
    result_waits INTEGER NOT NULL DEFAULT 0,
    events_wait  INTEGER NOT NULL DEFAULT 0,
    asides_wait  INTEGER NOT NULL DEFAULT 0,
    next_event   INTEGER NOT NULL DEFAULT 1,
    apologised   INTEGER NOT NULL DEFAULT 0,
    restarts     INTEGER NOT NULL DEFAULT 0,
    cursor       TEXT,
    deliver_at   INTEGER,               -- when its first message in the outbox is to be sent
    accepted_at  INTEGER NOT NULL,
    settled_at   INTEGER
);
CREATE INDEX calls_to_run ON calls (seq) WHERE state < 2;
CREATE INDEX calls_to_deliver ON calls (origin, deliver_at) WHERE deliver_at IS NOT NULL;
CREATE INDEX calls_settled ON calls (settled_at) WHERE state = 3;

-- The calls by their keys, up to the one that `meta` names; later ones may be missing (see keys.rs).
CREATE TABLE call_keys (
    key  BLOB PRIMARY KEY,
    call INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE outbox (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    call       INTEGER NOT NULL,
    kind       INTEGER NOT NULL,        -- 0 result, 1 event, 2 aside
    topic      TEXT,                    -- of an aside: which view it updates, or which question it asks
    body       BLOB NOT NULL,
    attempts   INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL
);
CREATE INDEX outbox_by_call ON outbox (call, seq);

CREATE TABLE questions (
    name    BLOB PRIMARY KEY,           -- a hash of what makes its URL unguessable
    call    INTEGER NOT NULL,
    choices INTEGER NOT NULL,           -- how many there are to choose from; 0 where consent is asked for
    answer  TEXT                        -- JSON
) WITHOUT ROWID;
CREATE INDEX questions_by_call ON questions (call);
