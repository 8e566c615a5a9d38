-- A running call that was cancelled: its handler may still return a result.
ALTER TABLE calls ADD COLUMN cancelled INTEGER NOT NULL DEFAULT 0;
-- Time since which every event of a subscription was refused.
ALTER TABLE calls ADD COLUMN refused_since INTEGER;
