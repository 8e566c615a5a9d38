-- Threads, their histories and their pending work. Every row carries its session. A thread row changes with every step,
-- so no index covers a column of it that changes: its updates stay HOT. Due times and questions are in tables of their own.

CREATE SEQUENCE thread_keys;

CREATE TABLE threads (
    no bigint PRIMARY KEY,
    id text COLLATE "C" NOT NULL UNIQUE,
    parent bigint,
    source bigint,                    -- the thread whose history it inherits: its parent, or that it was forked from
    session bigint NOT NULL,
    inherits bigint NOT NULL,         -- the last entry of its source's history that it inherits
    ancestors text NOT NULL,          -- ids, root first, as JSON
    incarnation bigint NOT NULL,      -- random; part of every callback token
    agent text NOT NULL,
    user_id text,
    title text,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    version bigint NOT NULL,
    status text NOT NULL,
    head text NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX threads_parent ON threads (parent, no) WHERE parent IS NOT NULL;
-- The user of a thread never changes. Calls, questions, wake times and deliveries carry it too, so that the listings of a
-- user are read by an index.
CREATE INDEX threads_user ON threads (user_id, no) WHERE user_id IS NOT NULL;

-- Threads that failed or need a person. They are few.
CREATE TABLE attention (
    thread bigint PRIMARY KEY,
    session bigint NOT NULL,
    status text NOT NULL
);
CREATE INDEX attention_session ON attention (session, status);
CREATE INDEX attention_status ON attention (status, thread);

-- Changes of the number of threads of each status. Their sum is the number; `prune` adds them up.
CREATE TABLE thread_counts (
    status text NOT NULL,
    change bigint NOT NULL
);

-- Questions to the model.
CREATE TABLE asks (
    thread bigint PRIMARY KEY,
    session bigint NOT NULL,
    turn bigint NOT NULL,
    agent text NOT NULL,
    destination text COLLATE "C" NOT NULL,
    due_at bigint NOT NULL,
    attempts bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
CREATE INDEX asks_new ON asks (destination, session, due_at) WHERE attempts = 0;
CREATE INDEX asks_retry ON asks (destination, due_at) WHERE attempts > 0;
CREATE INDEX asks_retry_at ON asks (due_at) WHERE attempts > 0;

-- Times at which threads want to be woken.
CREATE TABLE wakes (
    thread bigint PRIMARY KEY,
    session bigint NOT NULL,
    due_at bigint NOT NULL,
    is_retry boolean NOT NULL,        -- the thread failed or is paused
    user_id text
);
CREATE INDEX wakes_user ON wakes (user_id, due_at, thread) WHERE user_id IS NOT NULL AND is_retry;
CREATE INDEX wakes_due ON wakes (due_at, thread);
CREATE INDEX wakes_retry ON wakes (due_at, thread) WHERE is_retry;

CREATE TABLE entries (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    seq bigint NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (thread, seq)
);

-- Positions of summaries. A model sees the last one instead of the entries that it covers.
CREATE TABLE summaries (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    seq bigint NOT NULL,
    covers bigint NOT NULL,
    PRIMARY KEY (thread, seq)
);

CREATE TABLE held (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    queue bigint NOT NULL,
    no bigint NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (thread, queue, no)
);

-- Amounts that sessions with a budget have spent, as JSON.
CREATE TABLE spending (
    session bigint PRIMARY KEY,
    body text NOT NULL
) WITH (fillfactor = 70);

-- Entries of events that wait for a child.
CREATE TABLE backlog (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    call text COLLATE "C" NOT NULL,
    no bigint NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (thread, call, no)
);

CREATE TABLE calls (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    state bigint NOT NULL,
    call_id text,
    name text NOT NULL,
    server text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    since bigint NOT NULL,
    until bigint,                     -- when it times out
    invoke_at bigint,                 -- when its invocation is due; none once it was acknowledged
    attempts bigint NOT NULL DEFAULT 0,
    outcome text,                     -- of the last attempt
    acknowledged_at bigint,
    asked_after bigint,               -- when its server was last asked whether it works on the call
    gone_since bigint,                -- since when its server says that it does not
    user_id text,
    PRIMARY KEY (thread, id)
) WITH (fillfactor = 80);
CREATE INDEX calls_due ON calls (server, session, invoke_at, thread, id)
    WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0;
CREATE INDEX calls_retry ON calls (server, invoke_at) WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0;
CREATE INDEX calls_retry_at ON calls (invoke_at, thread, id)
    WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0;
CREATE INDEX calls_taken ON calls (thread, id) WHERE state = 0 AND invoke_at IS NULL;
CREATE INDEX calls_check ON calls (server, coalesce(asked_after, acknowledged_at))
    WHERE acknowledged_at IS NOT NULL AND state IN (0, 5);
CREATE INDEX calls_until ON calls (until, thread, id) WHERE until IS NOT NULL;
CREATE INDEX calls_user_open ON calls (user_id, thread, id) WHERE user_id IS NOT NULL AND state = 0;
CREATE INDEX calls_user_subscribed ON calls (user_id, since, thread, id) WHERE user_id IS NOT NULL AND state = 5;
CREATE INDEX calls_user_until ON calls (user_id, until, thread, id) WHERE user_id IS NOT NULL AND until IS NOT NULL;
CREATE INDEX calls_subscribed ON calls (since, thread, id) WHERE state = 5;

CREATE TABLE questions (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    no bigint NOT NULL,
    call text COLLATE "C" NOT NULL,
    server text COLLATE "C" NOT NULL,
    body bytea NOT NULL,              -- encrypted: it has URLs that act like a password
    asked_at bigint NOT NULL,
    answer bigint,
    answered_at bigint,
    answer_at bigint,                 -- when the delivery of the answer is due
    attempts bigint NOT NULL DEFAULT 0,
    user_id text,
    PRIMARY KEY (thread, no)
);
CREATE INDEX questions_user ON questions (user_id, asked_at, thread, no) WHERE user_id IS NOT NULL AND answer IS NULL;
CREATE INDEX questions_call ON questions (thread, call);
CREATE INDEX questions_inbox ON questions (asked_at, thread, no) WHERE answer IS NULL;
CREATE INDEX questions_answer ON questions (server, session, answer_at)
    WHERE answer_at IS NOT NULL AND attempts = 0;
CREATE INDEX questions_retry ON questions (server, answer_at) WHERE answer_at IS NOT NULL AND attempts > 0;
CREATE INDEX questions_retry_at ON questions (answer_at) WHERE answer_at IS NOT NULL AND attempts > 0;

CREATE TABLE views (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    server text COLLATE "C" NOT NULL,
    view_type text COLLATE "C" NOT NULL,
    content text NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (thread, server, view_type)
);

CREATE TABLE event_ids (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    call text COLLATE "C" NOT NULL,
    event text COLLATE "C" NOT NULL,
    no bigint NOT NULL,
    PRIMARY KEY (thread, call, event)
);
CREATE INDEX event_ids_no ON event_ids (thread, call, no);

-- Subscriptions that have ended and whose event ids are yet to be removed.
CREATE TABLE ended_subscriptions (
    session bigint NOT NULL,
    thread bigint NOT NULL,
    call text COLLATE "C" NOT NULL,
    PRIMARY KEY (thread, call)
);

-- Requests of clients that must not count twice, by a digest of the client's key and its scope.
CREATE TABLE requests (
    digest bytea PRIMARY KEY,
    session bigint NOT NULL,
    request bytea NOT NULL,           -- a digest of the request
    thread text NOT NULL,
    turn bigint NOT NULL,
    at bigint NOT NULL
);
CREATE INDEX requests_at ON requests (at);

-- Messages between threads.
CREATE TABLE outbox (
    no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session bigint NOT NULL,
    sender text NOT NULL,
    receiver text NOT NULL,
    body text NOT NULL,
    due_at bigint NOT NULL DEFAULT 0
);
CREATE INDEX outbox_postponed ON outbox (due_at) WHERE due_at > 0;

-- Documents of toolsets, by their hash. Sessions share them.
CREATE TABLE toolsets (
    hash text COLLATE "C" PRIMARY KEY,
    body bytea NOT NULL
);

-- The toolset of each server in a session, and the reason why there is none.
CREATE TABLE session_tools (
    session bigint NOT NULL,
    server text COLLATE "C" NOT NULL,
    hash text COLLATE "C",
    error text,
    fetched_at bigint NOT NULL,
    PRIMARY KEY (session, server)
);
CREATE INDEX session_tools_newest ON session_tools (server, fetched_at) WHERE hash IS NOT NULL;

-- Deliveries that did not succeed at their first attempt, in both directions, and the reasons for refusals.
CREATE TABLE deliveries (
    no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session bigint NOT NULL,
    kind text COLLATE "C" NOT NULL,
    thread bigint NOT NULL,           -- 0 if none is known
    call text COLLATE "C" NOT NULL,   -- empty if it is about no call
    server text COLLATE "C" NOT NULL, -- base URL of the tool server; empty if none is known
    topic text COLLATE "C" NOT NULL,  -- distinguishes records that are equal in the columns above
    outcome text COLLATE "C" NOT NULL,
    attempts bigint NOT NULL,
    detail text NOT NULL,             -- the outcome of the last attempt
    first_at bigint NOT NULL,
    last_at bigint NOT NULL,
    user_id text,
    UNIQUE (thread, call, kind, topic, server)
);
CREATE INDEX deliveries_last ON deliveries (kind, last_at);
CREATE INDEX deliveries_user ON deliveries (user_id, no) WHERE user_id IS NOT NULL;

-- Tokens of clients.
CREATE TABLE tokens (
    no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    digest bytea NOT NULL UNIQUE,     -- SHA-256 of the token, which is not stored
    name text NOT NULL,
    scope text NOT NULL,
    user_id text,                     -- the token sees only threads of this user
    created_at bigint NOT NULL,
    used_at bigint                    -- approximate time of the last request
);
