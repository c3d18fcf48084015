-- Every table of the store. An execution's row in "heads" is at the same time its place in the queue.
-- Times are seconds since the epoch; states, blobs, entries and payloads are opaque bytes; each row has a checksum.

-- Where an execution is and who owns it. Replaced by every checkpoint, so it is narrow, half of each page is free, and
-- no index has a column that an ordinary checkpoint changes: such an update stays on its page and touches no index.
CREATE TABLE {schema}.heads (
    id          text COLLATE "C" NOT NULL,
    workflow    text NOT NULL,
    queue       text NOT NULL,
    priority    bigint NOT NULL,
    parent_id   text,
    created     double precision NOT NULL,
    state       text NOT NULL,
    fence       bigint NOT NULL,
    revision    bigint NOT NULL,
    owner       text,
    seq         bigint NOT NULL,
    step        bigint NOT NULL,
    visit       bigint NOT NULL,
    iteration   bigint NOT NULL,
    attempt     bigint NOT NULL,
    started     double precision,
    updated     double precision NOT NULL,
    ended       double precision,
    due         double precision,
    signal      text,
    woken       boolean NOT NULL,
    hold        boolean NOT NULL,
    crashes     bigint NOT NULL,
    error       text,
    reason      text,
    progress    double precision NOT NULL,
    done        double precision NOT NULL,
    "of"        double precision,
    note        text,
    crc         bigint NOT NULL,
    last_message bigint NOT NULL DEFAULT 0,
    claim_token bigint NOT NULL DEFAULT 0,
    -- From when on it may be claimed as due: 0 at once, null never by itself.
    wake        double precision GENERATED ALWAYS AS (
        CASE
            WHEN state = 'running' THEN 0
            WHEN state NOT IN ('initialized', 'waiting', 'resuming') THEN NULL
            WHEN woken OR (due IS NULL AND signal IS NULL) THEN 0
            ELSE due
        END
    ) STORED,
    CONSTRAINT heads_pkey PRIMARY KEY (id)
) WITH (fillfactor = 50);

CREATE INDEX heads_created ON {schema}.heads (created, id);
CREATE INDEX heads_state ON {schema}.heads (state, created, id);
CREATE INDEX heads_workflow ON {schema}.heads (workflow, created, id);
CREATE INDEX heads_queue ON {schema}.heads (queue, created, id);
CREATE INDEX heads_parent ON {schema}.heads (parent_id, created, id) WHERE parent_id IS NOT NULL;
CREATE INDEX heads_owner ON {schema}.heads (owner, created, id) WHERE owner IS NOT NULL;
CREATE INDEX heads_ended ON {schema}.heads (ended) WHERE ended IS NOT NULL;
CREATE INDEX heads_ready ON {schema}.heads (priority DESC, created, id) WHERE owner IS NULL AND wake <= 0;
CREATE INDEX heads_sleeping ON {schema}.heads (wake) WHERE owner IS NULL AND wake > 0;

-- What never changes. "labels" is the metadata again, for filters; "search" is folded text, for looking up a word.
CREATE TABLE {schema}.definitions (
    id          text COLLATE "C" NOT NULL,
    version     text NOT NULL,
    total       bigint NOT NULL,
    metadata    text NOT NULL,
    steps       text NOT NULL,
    labels      jsonb NOT NULL,
    search      text NOT NULL,
    token       bigint NOT NULL,
    crc         bigint NOT NULL,
    steps_crc   bigint NOT NULL,
    CONSTRAINT definitions_pkey PRIMARY KEY (id)
);

CREATE INDEX definitions_labels ON {schema}.definitions USING gin (labels jsonb_path_ops);

-- One small row a checkpoint, for the execution's life; only ever added.
CREATE TABLE {schema}.boundaries (
    execution   text COLLATE "C" NOT NULL,
    seq         bigint NOT NULL,
    kind        text NOT NULL,
    step        bigint NOT NULL,
    name        text,
    started     double precision,
    ended       double precision NOT NULL,
    attempts    bigint NOT NULL,
    error       text,
    next        bigint NOT NULL,
    visit       bigint NOT NULL,
    iteration   bigint NOT NULL,
    size        bigint NOT NULL,
    crc         bigint NOT NULL,
    CONSTRAINT boundaries_pkey PRIMARY KEY (execution, seq)
);

-- The states that retention still keeps. Apart from the boundaries, so that finding the newest never reads old rows.
CREATE TABLE {schema}.states (
    execution   text COLLATE "C" NOT NULL,
    seq         bigint NOT NULL,
    blobs       text,
    data        bytea NOT NULL,
    crc         bigint NOT NULL,
    CONSTRAINT states_pkey PRIMARY KEY (execution, seq)
);

CREATE TABLE {schema}.blobs (
    execution   text COLLATE "C" NOT NULL,
    name        text NOT NULL,
    data        bytea NOT NULL,
    crc         bigint NOT NULL,
    CONSTRAINT blobs_pkey PRIMARY KEY (execution, name)
);

CREATE TABLE {schema}.entries (
    execution   text COLLATE "C" NOT NULL,
    key         text NOT NULL,
    data        bytea NOT NULL,
    crc         bigint NOT NULL,
    CONSTRAINT entries_pkey PRIMARY KEY (execution, key)
);

CREATE TABLE {schema}.messages (
    execution   text COLLATE "C" NOT NULL,
    id          bigint NOT NULL,
    kind        text NOT NULL,
    name        text,
    key         text,
    payload     bytea,
    options     text,
    sent        double precision NOT NULL,
    crc         bigint NOT NULL,
    CONSTRAINT messages_pkey PRIMARY KEY (execution, id)
);

-- Which number a message got, also after it was taken: by its key, and by the token of the write that sent it.
CREATE TABLE {schema}.receipts (
    execution   text COLLATE "C" NOT NULL,
    id          bigint NOT NULL,
    token       bigint NOT NULL,
    key         text,
    CONSTRAINT receipts_pkey PRIMARY KEY (execution, id)
);

CREATE UNIQUE INDEX receipts_token ON {schema}.receipts (execution, token);
CREATE UNIQUE INDEX receipts_key ON {schema}.receipts (execution, key) WHERE key IS NOT NULL;

CREATE TABLE {schema}.owners (
    id          text COLLATE "C" NOT NULL,
    life        text NOT NULL,
    workflows   text NOT NULL,
    queues      text NOT NULL,
    expires     timestamptz NOT NULL,
    CONSTRAINT owners_pkey PRIMARY KEY (id)
);

-- Copies of damaged rows, as JSON text (bytes in hexadecimal). Nothing here is ever removed by the library.
CREATE TABLE {schema}.quarantine (
    execution   text COLLATE "C" NOT NULL,
    part        text NOT NULL,
    digest      text NOT NULL,
    found       timestamptz NOT NULL DEFAULT clock_timestamp(),
    content     text NOT NULL,
    CONSTRAINT quarantine_pkey PRIMARY KEY (execution, part, digest)
);

-- The server's own compression costs a large state three times its writing; whoever wants it smaller uses a seal.
ALTER TABLE {schema}.states ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE {schema}.blobs ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE {schema}.entries ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE {schema}.messages ALTER COLUMN payload SET STORAGE EXTERNAL;
