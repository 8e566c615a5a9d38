-- Work has a destination, a session and a due time, so that each destination is served by itself and sessions take
-- turns. Event marks have numbers, so that they are bounded and pruned by an index.

ALTER TABLE threads ADD COLUMN ask_to TEXT;       -- the model server that the question goes to
ALTER TABLE threads ADD COLUMN ask_at INTEGER;    -- when the question is due
ALTER TABLE threads ADD COLUMN ask_attempts INTEGER NOT NULL DEFAULT 0;
UPDATE threads SET ask_to = '', ask_at = updated_at WHERE ask IS NOT NULL;
DROP INDEX threads_ask;
-- Work that was not tried is due at once and found by session; what is to be tried again is found by time.
CREATE INDEX threads_ask ON threads (ask_to, root, ask_at) WHERE ask IS NOT NULL AND ask_attempts = 0;
CREATE INDEX threads_retry ON threads (ask_to, ask_at) WHERE ask_attempts > 0;
CREATE INDEX threads_retry_at ON threads (ask_at) WHERE ask_attempts > 0;

ALTER TABLE calls ADD COLUMN root INTEGER NOT NULL DEFAULT 0;
UPDATE calls SET root = coalesce((SELECT root FROM threads WHERE no = calls.thread), 0);
-- Subscriptions are checked like calls.
UPDATE calls SET acknowledged_at = coalesce(acknowledged_at, since), asked_after = NULL, gone_since = NULL WHERE state = 5;
DROP INDEX calls_open;
CREATE INDEX calls_due ON calls (server, root, invoke_at)
    WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0;
CREATE INDEX calls_retry ON calls (server, invoke_at) WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0;
CREATE INDEX calls_retry_at ON calls (invoke_at) WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0;
CREATE INDEX calls_taken ON calls (thread, id) WHERE state = 0 AND invoke_at IS NULL;
DROP INDEX calls_doubtful;
CREATE INDEX calls_check ON calls (server, coalesce(asked_after, acknowledged_at))
    WHERE acknowledged_at IS NOT NULL AND state IN (0, 5);

ALTER TABLE questions ADD COLUMN server TEXT NOT NULL DEFAULT '';
ALTER TABLE questions ADD COLUMN root INTEGER NOT NULL DEFAULT 0;
UPDATE questions SET
    server = coalesce((SELECT server FROM calls WHERE thread = questions.thread AND id = questions.call), ''),
    root = coalesce((SELECT root FROM threads WHERE no = questions.thread), 0);
DROP INDEX questions_answer;
CREATE INDEX questions_answer ON questions (server, root, answer_at) WHERE answer_at IS NOT NULL AND attempts = 0;
CREATE INDEX questions_retry ON questions (server, answer_at) WHERE answer_at IS NOT NULL AND attempts > 0;
CREATE INDEX questions_retry_at ON questions (answer_at) WHERE answer_at IS NOT NULL AND attempts > 0;

ALTER TABLE letters ADD COLUMN root INTEGER NOT NULL DEFAULT 0;
ALTER TABLE letters ADD COLUMN due_at INTEGER NOT NULL DEFAULT 0;
UPDATE letters SET root = coalesce((SELECT root FROM threads WHERE id = letters.sender), 0);
CREATE INDEX letters_put_off ON letters (due_at) WHERE due_at > 0;

-- Marks of before are older than those to come, which are counted from 1.
ALTER TABLE seen ADD COLUMN no INTEGER NOT NULL DEFAULT 0;
UPDATE seen SET no = numbered.no FROM (
    SELECT thread, call, event, 1 - row_number() OVER (PARTITION BY thread, call ORDER BY at DESC) AS no FROM seen
) AS numbered
WHERE seen.thread = numbered.thread AND seen.call = numbered.call AND seen.event = numbered.event;
DROP INDEX seen_at;
CREATE INDEX seen_no ON seen (thread, call, no);
-- Subscriptions that have ended and whose marks are yet to be removed.
CREATE TABLE ended_subscriptions (
    thread INTEGER NOT NULL,
    call TEXT NOT NULL,
    PRIMARY KEY (thread, call)
) WITHOUT ROWID;
INSERT INTO ended_subscriptions (thread, call) SELECT DISTINCT thread, call FROM seen
WHERE NOT EXISTS (SELECT 1 FROM calls WHERE calls.thread = seen.thread AND id = seen.call AND state = 5);

CREATE INDEX session_tools_newest ON session_tools (server, fetched_at) WHERE hash IS NOT NULL;
