//! Statements that read, write and delete the rows of a session.

use crate::store::transfer::TABLES;

/// For each kind of rows, in the order of [`TABLES`]: the query for those of a session, each with the id of its thread
/// first, the statement that writes one, and the condition for the rows of a session, with their table. A row is written
/// with its thread, its session, its user, and its columns.
pub(super) const STATEMENTS: [(&str, &str, &str); TABLES.len()] = [
    (
        "SELECT NULL, hash, body FROM toolsets WHERE hash IN (SELECT hash FROM session_tools WHERE session = SESSION)",
        "INSERT INTO toolsets (hash, body) VALUES ($4, $5) ON CONFLICT DO NOTHING",
        "",
    ),
    (
        "SELECT NULL, server, hash, error, fetched_at FROM session_tools WHERE session = SESSION",
        "INSERT INTO session_tools (session, server, hash, error, fetched_at) VALUES ($2, $4, $5, $6, $7)",
        "session_tools WHERE session = SESSION",
    ),
    (
        "SELECT NULL, body FROM spending WHERE session = SESSION",
        "INSERT INTO spending (session, body) VALUES ($2, $4)",
        "spending WHERE session = SESSION",
    ),
    (
        // Below its first own entry, a fork may have copies that nothing reads yet.
        "SELECT t.id, seq, body FROM threads t JOIN entries x ON x.thread = t.no AND x.seq > t.inherits \
         WHERE t.no = ANY(THREADS)",
        "INSERT INTO entries (thread, session, seq, body) VALUES ($1, $2, $4, $5)",
        "entries WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT t.id, queue, x.no, body FROM threads t JOIN held x ON x.thread = t.no WHERE t.no = ANY(THREADS)",
        "INSERT INTO held (thread, session, queue, no, body) VALUES ($1, $2, $4, $5, $6)",
        "held WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT t.id, call, x.no, body FROM threads t JOIN backlog x ON x.thread = t.no WHERE t.no = ANY(THREADS)",
        "INSERT INTO backlog (thread, session, call, no, body) VALUES ($1, $2, $4, $5, $6)",
        "backlog WHERE thread = ANY(THREADS)",
    ),
    (
        // A call that a node has claimed may have been sent.
        "SELECT t.id, x.id, state, call_id, name, server, seq, since, until, invoke_at, \
         CASE WHEN attempts = 0 AND invoke_at IS NOT NULL AND claim IS NOT NULL THEN 1 ELSE attempts END, outcome, \
         acknowledged_at, asked_after, gone_since, \
         CASE WHEN invoke_at IS NULL OR attempts > 0 OR claim IS NOT NULL THEN callback_base END FROM threads t JOIN calls x ON x.thread = t.no \
         WHERE t.no = ANY(THREADS)",
        "INSERT INTO calls (thread, session, user_id, id, state, call_id, name, server, seq, since, until, invoke_at, \
         attempts, outcome, acknowledged_at, asked_after, gone_since, callback_base) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)",
        "calls WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT t.id, x.no, call, server, body, asked_at, answer, answered_at, answer_at, attempts \
         FROM threads t JOIN questions x ON x.thread = t.no WHERE t.no = ANY(THREADS)",
        "INSERT INTO questions (thread, session, user_id, no, call, server, body, asked_at, answer, answered_at, \
         answer_at, attempts) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        "questions WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT t.id, server, view_type, content, at FROM threads t JOIN views x ON x.thread = t.no \
         WHERE t.no = ANY(THREADS)",
        "INSERT INTO views (thread, session, server, view_type, content, at) VALUES ($1, $2, $4, $5, $6, $7)",
        "views WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT t.id, call, event, x.no FROM threads t JOIN event_ids x ON x.thread = t.no WHERE t.no = ANY(THREADS)",
        "INSERT INTO event_ids (thread, session, call, event, no) VALUES ($1, $2, $4, $5, $6)",
        "event_ids WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT t.id, call FROM threads t JOIN ended_subscriptions x ON x.thread = t.no WHERE t.no = ANY(THREADS)",
        "INSERT INTO ended_subscriptions (thread, session, call) VALUES ($1, $2, $4)",
        "ended_subscriptions WHERE thread = ANY(THREADS)",
    ),
    (
        "SELECT NULL, sender, receiver, body, due_at FROM outbox WHERE session = SESSION ORDER BY no",
        "INSERT INTO outbox (session, sender, receiver, body, due_at) VALUES ($2, $4, $5, $6, $7)",
        "outbox WHERE session = SESSION",
    ),
    (
        "SELECT t.id, digest, request, turn, at FROM threads t JOIN requests x ON x.thread = t.id \
         WHERE t.no = ANY(THREADS)",
        "INSERT INTO requests (session, thread, digest, request, turn, at) \
         SELECT $2, id, $4, $5, $6, $7 FROM threads WHERE no = $1 ON CONFLICT DO NOTHING",
        "requests WHERE thread IN (SELECT id FROM threads WHERE no = ANY(THREADS))",
    ),
    (
        "SELECT t.id, kind, call, server, topic, outcome, attempts, detail, first_at, last_at \
         FROM threads t JOIN deliveries x ON x.thread = t.no WHERE t.no = ANY(THREADS) ORDER BY x.no",
        "INSERT INTO deliveries (thread, session, user_id, kind, call, server, topic, outcome, attempts, detail, \
         first_at, last_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        "deliveries WHERE thread = ANY(THREADS)",
    ),
];

/// Tables with rows that are derived from the heads of threads.
pub(super) const DERIVED: [&str; 5] = ["summaries", "attention", "asks", "wakes", "damaged"];
