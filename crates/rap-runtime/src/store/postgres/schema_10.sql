-- Threads that were moved to another runtime, which gets the callbacks that arrive here for them.

CREATE TABLE departures (
    token_key bigint NOT NULL,        -- the key in the callback tokens of the thread
    incarnation bigint NOT NULL,
    destination text NOT NULL,        -- base URL of the runtime
    at bigint NOT NULL,               -- time of the move, or of the last callback, to the day
    PRIMARY KEY (token_key, incarnation)
);
CREATE INDEX departures_at ON departures (at);
