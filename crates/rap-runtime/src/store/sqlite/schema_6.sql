-- Messages to people who are away. A row is deleted when its message was delivered or given up.

CREATE TABLE alerts (
    no INTEGER PRIMARY KEY AUTOINCREMENT,
    destination TEXT NOT NULL,        -- a digest of the URL
    thread TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    at INTEGER NOT NULL,
    due INTEGER NOT NULL,             -- time of the next attempt; during an attempt, the time after which it counts as lost
    attempts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX alerts_due ON alerts (destination, due);
CREATE INDEX alerts_at ON alerts (at);
