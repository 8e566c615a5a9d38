-- Closed sessions that are being deleted. They are hidden, and their rows are deleted in batches.

CREATE TABLE deletions (
    session bigint PRIMARY KEY,
    due bigint NOT NULL,              -- time of the next batch
    is_ready boolean NOT NULL DEFAULT false -- its threads are closed, and forks inherit nothing from them any more
);
CREATE INDEX alerts_thread ON alerts (thread);
