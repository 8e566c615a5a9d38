-- Tokens of clients, and the user of everything that is listed, so that the listings of a user are read by an index. Rows
-- of threads without a user are not in these indexes.

CREATE TABLE tokens (
    no INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,      -- SHA-256 of the token, which is not stored
    name TEXT NOT NULL,
    scope TEXT NOT NULL,
    user_id TEXT,                     -- the token sees only threads of this user
    created_at INTEGER NOT NULL,
    used_at INTEGER                   -- approximate time of the last request
);

CREATE INDEX threads_user ON threads (user_id) WHERE user_id IS NOT NULL;
CREATE INDEX threads_user_status ON threads (user_id, status) WHERE user_id IS NOT NULL;
CREATE INDEX threads_user_due ON threads (user_id, due) WHERE user_id IS NOT NULL AND due IS NOT NULL;

ALTER TABLE calls ADD COLUMN user_id TEXT;
UPDATE calls SET user_id = (SELECT user_id FROM threads WHERE no = calls.thread)
WHERE thread IN (SELECT no FROM threads WHERE user_id IS NOT NULL);
CREATE INDEX calls_user_open ON calls (user_id) WHERE user_id IS NOT NULL AND state = 0;
CREATE INDEX calls_user_subscribed ON calls (user_id, since) WHERE user_id IS NOT NULL AND state = 5;
CREATE INDEX calls_user_until ON calls (user_id, until) WHERE user_id IS NOT NULL AND until IS NOT NULL;

ALTER TABLE questions ADD COLUMN user_id TEXT;
UPDATE questions SET user_id = (SELECT user_id FROM threads WHERE no = questions.thread)
WHERE thread IN (SELECT no FROM threads WHERE user_id IS NOT NULL);
CREATE INDEX questions_user ON questions (user_id, asked_at) WHERE user_id IS NOT NULL AND answer IS NULL;

ALTER TABLE deliveries ADD COLUMN user_id TEXT;
UPDATE deliveries SET user_id = (SELECT user_id FROM threads WHERE no = deliveries.thread)
WHERE thread IN (SELECT no FROM threads WHERE user_id IS NOT NULL);
CREATE INDEX deliveries_user ON deliveries (user_id) WHERE user_id IS NOT NULL;
