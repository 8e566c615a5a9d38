-- Sessions that move between databases. A parcel is a session that is not in use because it is on its way.

ALTER TABLE threads ADD COLUMN token_key bigint; -- the key in its callback tokens, if it was moved here
CREATE INDEX threads_token ON threads (token_key) WHERE token_key IS NOT NULL;
CREATE INDEX threads_forks ON threads (source) WHERE parent IS NULL AND source IS NOT NULL;
CREATE INDEX requests_thread ON requests (thread);

CREATE TABLE parcels (
    session text COLLATE "C" PRIMARY KEY, -- id of the root thread
    state text NOT NULL,
    peer bytea NOT NULL,              -- encrypted: the destination and a token for it
    at bigint NOT NULL
);
CREATE TABLE parcel_records (
    session text COLLATE "C" NOT NULL,
    no bigint NOT NULL,
    record text NOT NULL,
    PRIMARY KEY (session, no)
);
CREATE TABLE parcel_threads (
    id text COLLATE "C" PRIMARY KEY,
    session text COLLATE "C" NOT NULL
);
CREATE INDEX parcel_threads_session ON parcel_threads (session);
