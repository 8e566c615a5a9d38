//! The statements that write the rows of steps.

use super::bulk::{Kind, Table};

pub(super) static INSERT_HEAD: Kind = Kind::new(
    "INSERT INTO threads (no, id, parent, source, session, inherits, ancestors, incarnation, agent, user_id, title, \
     created_at, updated_at, version, status, head) \
     SELECT no, id, parent, source, session, inherits, ancestors, incarnation, agent, user_id, title, created_at, \
     updated_at, 1, status, head \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[], \
     $8::bigint[], $9::text[], $10::text[], $11::text[], $12::bigint[], $13::bigint[], $14::text[], $15::text[]) \
     AS w(no, id, parent, source, session, inherits, ancestors, incarnation, agent, user_id, title, created_at, \
     updated_at, status, head)",
    &[Table::Threads],
    1,
);
pub(super) static UPDATE_HEAD: Kind = Kind::checked(
    "WITH done AS (UPDATE threads t SET head = w.head, version = w.version + 1, status = w.status, updated_at = w.at \
     FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[]) AS w(no, version, head, status, at) \
     WHERE t.no = w.no AND t.version = w.version RETURNING 1) \
     SELECT 1 / (count(*) = $6)::int FROM done",
    &[Table::Threads],
    1,
);
pub(super) static COUNT: Kind = Kind::new(
    "INSERT INTO thread_counts (status, change) SELECT * FROM unnest($1::text[], $2::bigint[])",
    &[Table::Work],
    0,
);
pub(super) static PUT_ATTENTION: Kind = Kind::new(
    "INSERT INTO attention (thread, session, status) SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[]) \
     ON CONFLICT (thread) DO UPDATE SET status = excluded.status",
    &[Table::Work],
    1,
);
pub(super) static DROP_ATTENTION: Kind =
    Kind::new("DELETE FROM attention WHERE thread = ANY($1::bigint[])", &[Table::Work], 1);
pub(super) static PUT_ASK: Kind = Kind::new(
    "INSERT INTO asks (thread, session, turn, agent, destination, due_at, claim) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bigint[], $7::bigint[]) \
     ON CONFLICT (thread) DO UPDATE SET turn = excluded.turn, destination = excluded.destination, \
     due_at = excluded.due_at, attempts = 0, claim = excluded.claim",
    &[Table::Work],
    1,
);
pub(super) static DROP_ASK: Kind =
    Kind::new("DELETE FROM asks WHERE thread = ANY($1::bigint[])", &[Table::Work], 1);
pub(super) static PUT_WAKE: Kind = Kind::new(
    "INSERT INTO wakes (thread, session, due_at, is_retry, user_id) \
     SELECT thread, session, due_at, is_retry = 1, user_id \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[]) \
     AS w(thread, session, due_at, is_retry, user_id) \
     ON CONFLICT (thread) DO UPDATE SET due_at = excluded.due_at, is_retry = excluded.is_retry, claim = NULL",
    &[Table::Work],
    1,
);
pub(super) static DROP_WAKE: Kind =
    Kind::new("DELETE FROM wakes WHERE thread = ANY($1::bigint[])", &[Table::Work], 1);
pub(super) static APPEND: Kind = Kind::new(
    "INSERT INTO entries (session, thread, seq, body) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[])",
    &[Table::Entries],
    0,
);
pub(super) static SUMMARY: Kind = Kind::new(
    "INSERT INTO summaries (session, thread, seq, covers) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])",
    &[Table::Entries],
    0,
);
pub(super) static HOLD: Kind = Kind::new(
    "INSERT INTO held (thread, queue, no, session, body) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[])",
    &[Table::Held],
    3,
);
pub(super) static RELEASE: Kind = Kind::checked(
    "WITH w AS (SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], \
     $6::bigint[]) AS w(thread, queue, first, until, seq, session)), \
     gone AS (DELETE FROM held h USING w WHERE h.thread = w.thread AND h.queue = w.queue AND h.no < w.until \
     RETURNING w.session, h.thread, w.seq + h.no - w.first AS seq, h.body, h.no >= w.first AS is_kept), \
     done AS (INSERT INTO entries (session, thread, seq, body) \
     SELECT session, thread, seq, body FROM gone WHERE is_kept RETURNING 1) \
     SELECT 1 / (count(*) = $7)::int FROM done",
    &[Table::Held],
    2,
);
pub(super) static OPEN: Kind = Kind::new(
    "INSERT INTO calls (thread, id, session, state, call_id, name, server, seq, since, until, invoke_at, user_id, claim, \
     callback_base) \
     SELECT thread, id, session, 0, call_id, name, server, seq, since, until, invoke_at, user_id, claim, callback_base \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::bigint[], \
     $8::bigint[], $9::bigint[], $10::bigint[], $11::text[], $12::bigint[], $13::text[]) \
     AS w(thread, id, session, call_id, name, server, seq, since, until, invoke_at, user_id, claim, callback_base)",
    &[Table::Calls],
    0,
);
pub(super) static APPROVE: Kind = Kind::new(
    "UPDATE calls c SET since = w.since, until = w.until, invoke_at = w.since, claim = NULL, until_claim = NULL, \
     callback_base = w.callback_base FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[]) \
     AS w(thread, id, since, until, callback_base) \
     WHERE c.thread = w.thread AND c.id = w.id",
    &[Table::Calls],
    2,
);
pub(super) static SETTLE: Kind = Kind::new(
    "UPDATE calls c SET state = w.state, invoke_at = NULL, until = NULL, claim = NULL, until_claim = NULL, \
     since = CASE WHEN w.state = 5 THEN w.at ELSE c.since END, \
     acknowledged_at = CASE WHEN w.state = 5 THEN w.at ELSE c.acknowledged_at END, \
     asked_after = CASE WHEN w.state = 5 THEN NULL ELSE c.asked_after END, \
     gone_since = CASE WHEN w.state = 5 THEN NULL ELSE c.gone_since END \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS w(thread, id, state, at) \
     WHERE c.thread = w.thread AND c.id = w.id",
    &[Table::Calls],
    2,
);
pub(super) static END_SUBSCRIPTION: Kind = Kind::new(
    "INSERT INTO ended_subscriptions (thread, call, session) \
     SELECT w.thread, w.call, w.session FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS w(thread, call, session) \
     WHERE EXISTS (SELECT 1 FROM event_ids e WHERE e.thread = w.thread AND e.call = w.call) ON CONFLICT DO NOTHING",
    &[Table::EventIds],
    2,
);
pub(super) static TIMER: Kind = Kind::new(
    "UPDATE calls c SET until = w.until, until_claim = NULL \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS w(thread, id, until) \
     WHERE c.thread = w.thread AND c.id = w.id",
    &[Table::Calls],
    2,
);
pub(super) static QUESTION: Kind = Kind::new(
    "INSERT INTO questions (thread, no, call, session, body, asked_at, user_id, server) \
     SELECT w.thread, w.no, w.call, w.session, w.body, w.at, w.user_id, \
     coalesce((SELECT c.server FROM calls c WHERE c.thread = w.thread AND c.id = w.call), '') \
     FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bytea[], $6::bigint[], $7::text[]) \
     AS w(thread, no, call, session, body, at, user_id) \
     ON CONFLICT (thread, no) DO UPDATE SET call = excluded.call, server = excluded.server, body = excluded.body, \
     asked_at = excluded.asked_at, answer = NULL, answered_at = NULL, answer_at = NULL, attempts = 0, claim = NULL",
    &[Table::Questions, Table::Calls],
    2,
);
pub(super) static ANSWER: Kind = Kind::new(
    "UPDATE questions q SET answer = w.answer, answered_at = w.at, answer_at = w.at, claim = NULL \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS w(thread, no, answer, at) \
     WHERE q.thread = w.thread AND q.no = w.no",
    &[Table::Questions],
    2,
);
pub(super) static DROP_QUESTIONS: Kind = Kind::new(
    "DELETE FROM questions q USING unnest($1::bigint[], $2::text[]) AS w(thread, call) \
     WHERE q.thread = w.thread AND q.call = w.call",
    &[Table::Questions],
    2,
);
pub(super) static VIEW: Kind = Kind::new(
    "INSERT INTO views (thread, server, view_type, session, content, at) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::bigint[]) \
     ON CONFLICT (thread, server, view_type) DO UPDATE SET content = excluded.content, at = excluded.at",
    &[Table::Views],
    3,
);
/// The view that was just written is the newest one, even if another one was written in the same millisecond.
pub(super) static PRUNE_VIEWS: Kind = Kind::new(
    "DELETE FROM views v USING unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) \
     AS w(thread, views, server, view_type), \
     LATERAL (SELECT o.server, o.view_type FROM views o WHERE o.thread = w.thread \
     ORDER BY (o.server = w.server AND o.view_type = w.view_type) DESC, o.at DESC, o.server, o.view_type \
     OFFSET w.views) AS old \
     WHERE v.thread = w.thread AND v.server = old.server AND v.view_type = old.view_type",
    &[Table::Views],
    1,
);
pub(super) static RECORD_EVENT_ID: Kind = Kind::new(
    "INSERT INTO event_ids (thread, call, event, session, no) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) ON CONFLICT DO NOTHING",
    &[Table::EventIds],
    3,
);
pub(super) static FORGET_EVENT_IDS: Kind = Kind::new(
    "DELETE FROM event_ids e USING unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS w(thread, call, up_to, most), \
     LATERAL (SELECT event FROM event_ids WHERE thread = w.thread AND call = w.call AND no <= w.up_to \
     ORDER BY no LIMIT w.most) AS old \
     WHERE e.thread = w.thread AND e.call = w.call AND e.event = old.event",
    &[Table::EventIds],
    2,
);
pub(super) static PUT_BACKLOG: Kind = Kind::new(
    "INSERT INTO backlog (thread, call, no, session, body) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])",
    &[Table::Backlog],
    3,
);
pub(super) static DROP_BACKLOG: Kind = Kind::new(
    "DELETE FROM backlog b USING unnest($1::bigint[], $2::text[]) AS w(thread, call) \
     WHERE b.thread = w.thread AND b.call = w.call",
    &[Table::Backlog],
    2,
);
pub(super) static MOVE_BACKLOG: Kind = Kind::checked(
    "WITH w AS (SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], \
     $7::bigint[]) AS w(thread, call, first, until, child, seq, session)), \
     gone AS (DELETE FROM backlog b USING w WHERE b.thread = w.thread AND b.call = w.call AND b.no < w.until \
     RETURNING w.session, w.child, w.seq + b.no - w.first AS seq, b.body, b.no >= w.first AS is_kept), \
     done AS (INSERT INTO entries (session, thread, seq, body) \
     SELECT session, child, seq, body FROM gone WHERE is_kept RETURNING 1) \
     SELECT 1 / (count(*) = $8)::int FROM done",
    &[Table::Backlog],
    2,
);
pub(super) static SEND: Kind = Kind::new(
    "INSERT INTO outbox (session, sender, receiver, body, claim) SELECT session, sender, receiver, body, claim \
     FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[]) WITH ORDINALITY \
     AS w(session, sender, receiver, body, claim, at) ORDER BY at",
    &[Table::Outbox],
    0,
);
pub(super) static DELIVERED: Kind =
    Kind::new("DELETE FROM outbox WHERE no = ANY($1::bigint[])", &[Table::Outbox], 0);
pub(super) static REQUEST: Kind = Kind::new(
    "INSERT INTO requests (digest, session, request, thread, turn, at) \
     SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::bytea[], $4::text[], $5::bigint[], $6::bigint[])",
    &[Table::Requests],
    0,
);
pub(super) static TOOLSET: Kind = Kind::new(
    "INSERT INTO toolsets (hash, body) SELECT * FROM unnest($1::text[], $2::bytea[]) ON CONFLICT DO NOTHING",
    &[Table::Toolsets],
    0,
);
/// A stand-in never replaces a toolset that the session has.
pub(super) static STAND_IN_TOOLSET: Kind = Kind::new(
    "INSERT INTO session_tools AS s (session, server, hash, error, fetched_at) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[]) \
     ON CONFLICT (session, server) DO UPDATE SET hash = coalesce(s.hash, excluded.hash)",
    &[Table::Toolsets],
    2,
);
pub(super) static SESSION_TOOLSET: Kind = Kind::new(
    "INSERT INTO session_tools AS s (session, server, hash, error, fetched_at) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[]) \
     ON CONFLICT (session, server) DO UPDATE SET hash = coalesce(excluded.hash, s.hash), error = excluded.error, \
     fetched_at = excluded.fetched_at",
    &[Table::Toolsets],
    2,
);
pub(super) static ALERT: Kind = Kind::new(
    "INSERT INTO alerts (destination, thread, state, reason, at, due) \
     SELECT destination, thread, state, reason, at, at \
     FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[]) \
     AS w(destination, thread, state, reason, at, most) \
     WHERE (SELECT count(*) FROM (SELECT 1 FROM alerts a WHERE a.destination = w.destination LIMIT w.most) AS few) < w.most",
    &[Table::Work],
    0,
);

/// All of them.
#[cfg(test)]
pub(super) static ALL: [&Kind; 35] = [
    &INSERT_HEAD,
    &UPDATE_HEAD,
    &COUNT,
    &PUT_ATTENTION,
    &DROP_ATTENTION,
    &PUT_ASK,
    &DROP_ASK,
    &PUT_WAKE,
    &DROP_WAKE,
    &APPEND,
    &SUMMARY,
    &HOLD,
    &RELEASE,
    &OPEN,
    &APPROVE,
    &SETTLE,
    &END_SUBSCRIPTION,
    &TIMER,
    &QUESTION,
    &ANSWER,
    &DROP_QUESTIONS,
    &VIEW,
    &PRUNE_VIEWS,
    &RECORD_EVENT_ID,
    &FORGET_EVENT_IDS,
    &PUT_BACKLOG,
    &DROP_BACKLOG,
    &MOVE_BACKLOG,
    &SEND,
    &DELIVERED,
    &REQUEST,
    &TOOLSET,
    &STAND_IN_TOOLSET,
    &SESSION_TOOLSET,
    &ALERT,
];
