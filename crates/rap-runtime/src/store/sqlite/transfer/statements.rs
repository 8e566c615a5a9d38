//! Statements that read, write and delete the rows of a session.

use crate::store::transfer::TABLES;

/// Statements for one kind of rows.
pub(super) struct RowStatements {
    /// Reads the rows of the session `?1`, each with the id of its thread first.
    pub(super) read: &'static str,
    /// Writes a row, with its thread (`?1`), its session, its user, and its columns.
    pub(super) write: &'static str,
    /// Deletes the rows of the session `?1`. Empty if other sessions may use them.
    pub(super) delete: &'static str,
}

/// Statements for each kind of rows, in the order of [`TABLES`]. `SESSION` stands for [`SESSION`].
pub(super) const STATEMENTS: [RowStatements; TABLES.len()] = [
    RowStatements {
        read: "SELECT NULL, hash, body FROM toolsets WHERE hash IN (SELECT hash FROM session_tools WHERE root = ?1)",
        write: "INSERT OR IGNORE INTO toolsets (hash, body) VALUES (?4, ?5)",
        delete: "",
    },
    RowStatements {
        read: "SELECT NULL, server, hash, error, fetched_at FROM session_tools WHERE root = ?1",
        write: "INSERT INTO session_tools (root, server, hash, error, fetched_at) VALUES (?2, ?4, ?5, ?6, ?7)",
        delete: "DELETE FROM session_tools WHERE root = ?1",
    },
    RowStatements {
        read: "SELECT NULL, body FROM spending WHERE root = ?1",
        write: "INSERT INTO spending (root, body) VALUES (?2, ?4)",
        delete: "DELETE FROM spending WHERE root = ?1",
    },
    RowStatements {
        // Below its first own entry, a fork may have copies that nothing reads yet.
        read: "SELECT t.id, e.key & 4294967295, e.body FROM threads t \
         JOIN entries e ON e.key > (t.no << 32) + t.born_at AND e.key < (t.no + 1) << 32 WHERE t.no IN SESSION",
        write: "INSERT INTO entries (key, body) VALUES ((?1 << 32) + ?4, ?5)",
        delete: "DELETE FROM entries WHERE key IN (SELECT e.key FROM threads t \
         JOIN entries e ON e.key > t.no << 32 AND e.key < (t.no + 1) << 32 WHERE t.no IN SESSION)",
    },
    RowStatements {
        read: "SELECT t.id, queue, x.no, body FROM threads t JOIN held x ON x.thread = t.no WHERE t.no IN SESSION",
        write: "INSERT INTO held (thread, queue, no, body) VALUES (?1, ?4, ?5, ?6)",
        delete: "DELETE FROM held WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT t.id, call, x.no, body FROM threads t JOIN backlog x ON x.thread = t.no WHERE t.no IN SESSION",
        write: "INSERT INTO backlog (thread, call, no, body) VALUES (?1, ?4, ?5, ?6)",
        delete: "DELETE FROM backlog WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT t.id, x.id, state, call_id, name, server, seq, since, until, invoke_at, attempts, outcome, \
         acknowledged_at, asked_after, gone_since, \
         CASE WHEN invoke_at IS NULL OR attempts > 0 THEN callback_base END FROM threads t JOIN calls x ON x.thread = t.no \
         WHERE t.no IN SESSION",
        write: "INSERT INTO calls (thread, root, user_id, id, state, call_id, name, server, seq, since, until, invoke_at, \
         attempts, outcome, acknowledged_at, asked_after, gone_since, callback_base) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)",
        delete: "DELETE FROM calls WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT t.id, x.no, call, server, body, asked_at, answer, answered_at, answer_at, attempts \
         FROM threads t JOIN questions x ON x.thread = t.no WHERE t.no IN SESSION",
        write: "INSERT INTO questions (thread, root, user_id, no, call, server, body, asked_at, answer, answered_at, \
         answer_at, attempts) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        delete: "DELETE FROM questions WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT t.id, server, view_type, content, at FROM threads t JOIN views x ON x.thread = t.no \
         WHERE t.no IN SESSION",
        write: "INSERT INTO views (thread, server, view_type, content, at) VALUES (?1, ?4, ?5, ?6, ?7)",
        delete: "DELETE FROM views WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT t.id, call, event, x.no FROM threads t JOIN seen x ON x.thread = t.no WHERE t.no IN SESSION",
        write: "INSERT INTO seen (thread, call, event, no, at) VALUES (?1, ?4, ?5, ?6, 0)",
        delete: "DELETE FROM seen WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT t.id, call FROM threads t JOIN ended_subscriptions x ON x.thread = t.no WHERE t.no IN SESSION",
        write: "INSERT INTO ended_subscriptions (thread, call) VALUES (?1, ?4)",
        delete: "DELETE FROM ended_subscriptions WHERE thread IN SESSION",
    },
    RowStatements {
        read: "SELECT NULL, sender, receiver, letter, due_at FROM letters WHERE root = ?1 ORDER BY no",
        write: "INSERT INTO letters (root, sender, receiver, letter, due_at) VALUES (?2, ?4, ?5, ?6, ?7)",
        delete: "DELETE FROM letters WHERE root = ?1",
    },
    RowStatements {
        read: "SELECT t.id, digest, request, turn, at FROM threads t JOIN repeats x ON x.thread = t.id \
         WHERE t.no IN SESSION",
        write: "INSERT OR IGNORE INTO repeats (thread, digest, request, turn, at) \
         VALUES ((SELECT id FROM threads WHERE no = ?1), ?4, ?5, ?6, ?7)",
        delete: "DELETE FROM repeats WHERE thread IN (SELECT id FROM threads WHERE no IN SESSION)",
    },
    RowStatements {
        read: "SELECT t.id, kind, call, server, topic, outcome, attempts, detail, first_at, last_at \
         FROM threads t JOIN deliveries x ON x.thread = t.no WHERE t.no IN SESSION ORDER BY x.no",
        write: "INSERT INTO deliveries (thread, user_id, kind, call, server, topic, outcome, attempts, detail, first_at, \
         last_at) VALUES (?1, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        delete: "DELETE FROM deliveries WHERE thread IN SESSION",
    },
];

/// The threads of a session.
pub(super) const SESSION: &str =
    "(SELECT ?1 UNION ALL SELECT no FROM threads WHERE root = ?1 AND parent IS NOT NULL)";

/// Returns a statement with [`SESSION`] filled in.
pub(super) fn sql(statement: &str) -> String {
    statement.replace("SESSION", SESSION)
}
