-- Threads that were set aside because of damage in their rows. A row counts only while its thread has the same version: the
-- next step of the thread ends it.
CREATE TABLE damaged (
    thread bigint PRIMARY KEY,
    session bigint NOT NULL,
    version bigint NOT NULL,
    why text NOT NULL,
    at bigint NOT NULL
);
