-- For the page: search over titles and texts, figures over time, and the roots of sessions.

-- Words of titles and of what people and models wrote, without the texts themselves. The id of a row is the key of its
-- entry; a title has the key of an entry with the number 0.
CREATE VIRTUAL TABLE search USING fts5 (text, content = '', contentless_delete = 1, tokenize = 'unicode61 remove_diacritics 2');
CREATE TRIGGER entry_is_searchable AFTER INSERT ON entries
WHEN substr(new.body, 1, 48) LIKE '%"kind":"user"%' OR substr(new.body, 1, 48) LIKE '%"kind":"assistant"%' BEGIN
    INSERT INTO search (rowid, text) SELECT new.key, substr(json_extract(new.body, '$.text'), 1, 100000)
    WHERE json_extract(new.body, '$.text') <> '';
END;
CREATE TRIGGER entry_is_not_searchable AFTER DELETE ON entries
WHEN substr(old.body, 1, 48) LIKE '%"kind":"user"%' OR substr(old.body, 1, 48) LIKE '%"kind":"assistant"%' BEGIN
    DELETE FROM search WHERE rowid = old.key;
END;
CREATE TRIGGER title_is_searchable AFTER INSERT ON threads WHEN new.title <> '' BEGIN
    INSERT INTO search (rowid, text) VALUES (new.no << 32, new.title);
END;
CREATE TRIGGER title_is_changed AFTER UPDATE OF title ON threads WHEN new.title IS NOT old.title BEGIN
    DELETE FROM search WHERE rowid = new.no << 32;
    INSERT INTO search (rowid, text) SELECT new.no << 32, new.title WHERE new.title <> '';
END;
CREATE TRIGGER title_is_not_searchable AFTER DELETE ON threads WHEN old.title <> '' BEGIN
    DELETE FROM search WHERE rowid = old.no << 32;
END;
INSERT INTO search (rowid, text) SELECT no << 32, title FROM threads WHERE title <> '';
INSERT INTO search (rowid, text) SELECT key, substr(json_extract(body, '$.text'), 1, 100000) FROM entries
WHERE (substr(body, 1, 48) LIKE '%"kind":"user"%' OR substr(body, 1, 48) LIKE '%"kind":"assistant"%')
    AND json_valid(body) AND json_extract(body, '$.text') <> '';

-- Work of the agents, in parts of time.
CREATE TABLE figures (
    at INTEGER NOT NULL,              -- when the part begins
    agent TEXT NOT NULL,
    wakes INTEGER NOT NULL,
    turns INTEGER NOT NULL,           -- requests to the model that were answered
    failures INTEGER NOT NULL,        -- requests to the model that failed
    model_ms INTEGER NOT NULL,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    cached INTEGER NOT NULL,
    cost INTEGER NOT NULL,            -- in billionths of a dollar
    PRIMARY KEY (at, agent)
) WITHOUT ROWID;

CREATE INDEX threads_roots ON threads (no) WHERE parent IS NULL;
