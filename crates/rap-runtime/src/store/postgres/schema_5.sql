-- Messages to people who are away. A row is deleted when its message was delivered or given up.

CREATE TABLE alerts (
    no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    destination text COLLATE "C" NOT NULL, -- a digest of the URL
    thread text COLLATE "C" NOT NULL,
    state text NOT NULL,
    reason text,
    at bigint NOT NULL,
    due bigint NOT NULL,              -- time of the next attempt; during an attempt, the time after which it counts as lost
    attempts bigint NOT NULL DEFAULT 0
);
CREATE INDEX alerts_due ON alerts (destination, due);
CREATE INDEX alerts_at ON alerts (at);
