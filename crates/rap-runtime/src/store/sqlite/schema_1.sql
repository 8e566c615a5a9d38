-- Threads, their histories, and what they wait on. A key of `entries` is the thread's number in the upper 32 bits and
-- the entry's sequence number in the lower ones, so that a history is one range.

CREATE TABLE threads (
    no INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES threads (no),
    source INTEGER REFERENCES threads (no), -- whose history it inherits: its parent's, or that it was forked from
    root INTEGER NOT NULL,
    born_at INTEGER NOT NULL,         -- it sees its source's history up to here
    ancestors TEXT NOT NULL,          -- ids, root first, as JSON
    incarnation INTEGER NOT NULL,     -- random; part of every callback token
    agent TEXT NOT NULL,
    user_id TEXT,
    title TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    version INTEGER NOT NULL,
    status TEXT NOT NULL,
    ask INTEGER,                      -- the turn that has to be asked
    due INTEGER,                      -- when the thread wants to be woken
    head TEXT NOT NULL
);
CREATE INDEX threads_parent ON threads (parent) WHERE parent IS NOT NULL;
CREATE INDEX threads_root ON threads (root) WHERE parent IS NOT NULL;
CREATE INDEX threads_ask ON threads (no) WHERE ask IS NOT NULL;
CREATE INDEX threads_due ON threads (due) WHERE due IS NOT NULL;

CREATE TABLE entries (
    key INTEGER PRIMARY KEY,
    body TEXT NOT NULL
);

-- Where the summaries are among them. A model sees the last one instead of what it covers.
CREATE TABLE summaries (
    thread INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    covers INTEGER NOT NULL,
    PRIMARY KEY (thread, seq)
) WITHOUT ROWID;

CREATE TABLE held (
    thread INTEGER NOT NULL,
    queue INTEGER NOT NULL,
    no INTEGER NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (thread, queue, no)
) WITHOUT ROWID;

-- What sessions with a budget have spent, as JSON.
CREATE TABLE spending (
    root INTEGER PRIMARY KEY,
    body TEXT NOT NULL
);

-- Entries of events that wait for a child.
CREATE TABLE backlog (
    thread INTEGER NOT NULL,
    call TEXT NOT NULL,
    no INTEGER NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (thread, call, no)
) WITHOUT ROWID;

CREATE TABLE calls (
    thread INTEGER NOT NULL,
    id TEXT NOT NULL,
    state INTEGER NOT NULL,
    call_id TEXT,
    name TEXT NOT NULL,
    server TEXT NOT NULL,
    seq INTEGER NOT NULL,
    since INTEGER NOT NULL,
    until INTEGER,                    -- when it times out
    invoke_at INTEGER,                -- when its invocation is due; none once it was acknowledged
    attempts INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,                     -- of the last attempt
    acknowledged_at INTEGER,
    asked_after INTEGER,              -- when its server was last asked whether anybody works on it
    gone_since INTEGER,               -- since when its server says that nobody does
    PRIMARY KEY (thread, id)
) WITHOUT ROWID;
CREATE INDEX calls_open ON calls (invoke_at) WHERE state = 0;
CREATE INDEX calls_doubtful ON calls (coalesce(asked_after, acknowledged_at)) WHERE state = 0 AND acknowledged_at IS NOT NULL;
CREATE INDEX calls_until ON calls (until) WHERE until IS NOT NULL;
CREATE INDEX calls_subscribed ON calls (since) WHERE state = 5;

CREATE TABLE questions (
    thread INTEGER NOT NULL,
    no INTEGER NOT NULL,
    call TEXT NOT NULL,
    body BLOB NOT NULL,               -- sealed: it holds URLs that are as good as a password
    asked_at INTEGER NOT NULL,
    answer INTEGER,
    answered_at INTEGER,
    answer_at INTEGER,                -- when the delivery of the answer is due
    attempts INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (thread, no)
) WITHOUT ROWID;
CREATE INDEX questions_call ON questions (thread, call);
CREATE INDEX questions_answer ON questions (answer_at) WHERE answer_at IS NOT NULL;

CREATE TABLE views (
    thread INTEGER NOT NULL,
    server TEXT NOT NULL,
    view_type TEXT NOT NULL,
    content TEXT NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (thread, server, view_type)
) WITHOUT ROWID;

CREATE TABLE seen (
    thread INTEGER NOT NULL,
    call TEXT NOT NULL,
    event TEXT NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (thread, call, event)
) WITHOUT ROWID;
CREATE INDEX seen_at ON seen (at);

-- Requests of clients that must not count twice, by a digest of what they are about and the client's key.
CREATE TABLE repeats (
    digest BLOB PRIMARY KEY,
    request BLOB NOT NULL,            -- a digest of what was asked
    thread TEXT NOT NULL,
    turn INTEGER NOT NULL,
    at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX repeats_at ON repeats (at);

CREATE TABLE letters (
    no INTEGER PRIMARY KEY AUTOINCREMENT,
    sender TEXT NOT NULL,
    receiver TEXT NOT NULL,
    letter TEXT NOT NULL
);

CREATE TABLE toolsets (
    hash TEXT PRIMARY KEY,
    body BLOB NOT NULL
) WITHOUT ROWID;

-- Which toolset a session holds of a server, and why it holds none.
CREATE TABLE session_tools (
    root INTEGER NOT NULL,
    server TEXT NOT NULL,
    hash TEXT,
    error TEXT,
    fetched_at INTEGER NOT NULL,
    PRIMARY KEY (root, server)
) WITHOUT ROWID;

-- The ledger: deliveries that did not go well at their first attempt, both ways, and how they went on. One row for each
-- thing to be delivered, or for each reason to refuse what was received.
CREATE TABLE deliveries (
    no INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    thread INTEGER NOT NULL,          -- 0 where none is known
    call TEXT NOT NULL,               -- empty where it is about no call
    server TEXT NOT NULL,             -- base URL of the tool server; empty where none is known
    topic TEXT NOT NULL,              -- tells apart what the columns above do not
    outcome TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    detail TEXT NOT NULL,             -- how the last attempt ended
    first_at INTEGER NOT NULL,
    last_at INTEGER NOT NULL,
    UNIQUE (thread, call, kind, topic, server)
);
CREATE INDEX deliveries_last ON deliveries (kind, last_at);

-- How many threads there are of each status, so that nobody has to count them: one row.
CREATE TABLE thread_counts (
    no INTEGER PRIMARY KEY,
    closed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    running INTEGER NOT NULL DEFAULT 0,
    needs_you INTEGER NOT NULL DEFAULT 0,
    waiting INTEGER NOT NULL DEFAULT 0,
    idle INTEGER NOT NULL DEFAULT 0
);
INSERT INTO thread_counts (no) VALUES (1);
CREATE TRIGGER thread_is_born AFTER INSERT ON threads BEGIN
    UPDATE thread_counts SET
        closed = closed + (new.status = 'closed'),
        failed = failed + (new.status = 'failed'),
        running = running + (new.status = 'running'),
        needs_you = needs_you + (new.status = 'needs_you'),
        waiting = waiting + (new.status = 'waiting'),
        idle = idle + (new.status = 'idle')
    WHERE no = 1;
END;
CREATE TRIGGER thread_changes_status AFTER UPDATE OF status ON threads WHEN new.status <> old.status BEGIN
    UPDATE thread_counts SET
        closed = closed + (new.status = 'closed') - (old.status = 'closed'),
        failed = failed + (new.status = 'failed') - (old.status = 'failed'),
        running = running + (new.status = 'running') - (old.status = 'running'),
        needs_you = needs_you + (new.status = 'needs_you') - (old.status = 'needs_you'),
        waiting = waiting + (new.status = 'waiting') - (old.status = 'waiting'),
        idle = idle + (new.status = 'idle') - (old.status = 'idle')
    WHERE no = 1;
END;

-- Threads that want somebody are few, and found without a look at the others.
CREATE INDEX threads_failed ON threads (no) WHERE status = 'failed';
CREATE INDEX threads_needs_you ON threads (no) WHERE status = 'needs_you';
