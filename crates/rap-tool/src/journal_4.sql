-- Calls that another tool server has moved here, encrypted. They become calls when their caller asks about one of them.
CREATE TABLE arrivals (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    caller  BLOB NOT NULL,
    session TEXT NOT NULL,
    thread  TEXT NOT NULL,
    record  BLOB NOT NULL,
    at      INTEGER NOT NULL
);
CREATE INDEX arrivals_by_thread ON arrivals (caller, thread);
CREATE INDEX arrivals_by_session ON arrivals (caller, session, seq);
CREATE INDEX arrivals_by_age ON arrivals (at);
