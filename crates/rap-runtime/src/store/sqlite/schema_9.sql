-- Closed sessions that are being deleted. They are hidden, and their rows are deleted in batches.

CREATE TABLE deletions (
    session INTEGER PRIMARY KEY,
    due INTEGER NOT NULL,             -- time of the next batch
    is_ready INTEGER NOT NULL DEFAULT 0 -- its threads are closed, and forks inherit nothing from them any more
);

-- A thread is deleted only if no other one refers to it.
CREATE INDEX threads_source ON threads (source) WHERE source IS NOT NULL;
CREATE INDEX alerts_thread ON alerts (thread);
