-- Sessions that move between databases. A parcel is a session that is not in use because it is on its way.

ALTER TABLE threads ADD COLUMN token_key INTEGER; -- the key in its callback tokens, if it was moved here
CREATE INDEX threads_token ON threads (token_key) WHERE token_key IS NOT NULL;
CREATE INDEX threads_forks ON threads (source) WHERE parent IS NULL AND source IS NOT NULL;
CREATE INDEX repeats_thread ON repeats (thread);

-- The last key of a thread that was deleted, so that no key is used twice: one row.
CREATE TABLE used_keys (last INTEGER NOT NULL);
INSERT INTO used_keys (last) VALUES (0);

CREATE TABLE parcels (
    session TEXT PRIMARY KEY,         -- id of the root thread
    state TEXT NOT NULL,
    peer BLOB NOT NULL,               -- encrypted: the destination and a token for it
    at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE parcel_records (
    session TEXT NOT NULL,
    no INTEGER NOT NULL,
    record TEXT NOT NULL,
    UNIQUE (session, no)
);
CREATE TABLE parcel_threads (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX parcel_threads_session ON parcel_threads (session);

CREATE TRIGGER thread_is_deleted AFTER DELETE ON threads BEGIN
    UPDATE used_keys SET last = max(last, old.no);
    UPDATE thread_counts SET
        closed = closed - (old.status = 'closed'),
        failed = failed - (old.status = 'failed'),
        running = running - (old.status = 'running'),
        needs_you = needs_you - (old.status = 'needs_you'),
        waiting = waiting - (old.status = 'waiting'),
        idle = idle - (old.status = 'idle')
    WHERE no = 1;
END;
