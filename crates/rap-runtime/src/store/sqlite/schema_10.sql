-- Threads that were moved to another runtime, which gets the callbacks that arrive here for them.
CREATE TABLE departures (
    token_key INTEGER NOT NULL,       -- the key in the callback tokens of the thread
    incarnation INTEGER NOT NULL,
    destination TEXT NOT NULL,        -- base URL of the runtime
    at INTEGER NOT NULL,              -- time of the move, or of the last callback, to the day
    PRIMARY KEY (token_key, incarnation)
) WITHOUT ROWID;
CREATE INDEX departures_at ON departures (at);
