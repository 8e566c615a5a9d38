-- For the page: search over titles and texts, figures over time, and the roots of sessions.

-- Words of what people and models wrote. A text with a NUL character cannot be read as JSON by Postgres, and is left out.
CREATE INDEX entries_words ON entries USING gin (to_tsvector('simple',
    CASE WHEN strpos(body, '\u0000') > 0 THEN '' ELSE left(body::jsonb ->> 'text', 100000) END))
    WHERE left(body, 48) LIKE '%"kind":"user"%' OR left(body, 48) LIKE '%"kind":"assistant"%';
CREATE INDEX threads_words ON threads USING gin (to_tsvector('simple', title)) WHERE title IS NOT NULL;

-- Work of the agents, in parts of time.
CREATE TABLE figures (
    at bigint NOT NULL,               -- when the part begins
    agent text COLLATE "C" NOT NULL,
    wakes bigint NOT NULL,
    turns bigint NOT NULL,            -- requests to the model that were answered
    failures bigint NOT NULL,         -- requests to the model that failed
    model_ms bigint NOT NULL,
    input bigint NOT NULL,
    output bigint NOT NULL,
    cached bigint NOT NULL,
    cost bigint NOT NULL,             -- in billionths of a dollar
    PRIMARY KEY (at, agent)
);

CREATE INDEX threads_roots ON threads (no) WHERE parent IS NULL;

-- Time at which an event arrived, in milliseconds. Events of before have none.
ALTER TABLE event_ids ADD COLUMN at bigint;
ALTER TABLE event_ids ALTER COLUMN at SET DEFAULT (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
