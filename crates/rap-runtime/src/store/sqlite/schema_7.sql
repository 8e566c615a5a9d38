-- Threads that were set aside because of damage in their rows. A row counts only while its thread has the same version: the
-- next step of the thread ends it.
CREATE TABLE damaged (
    thread INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    why TEXT NOT NULL,
    at INTEGER NOT NULL
);
