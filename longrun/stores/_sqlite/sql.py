"""Every SQL statement of the SQLite store, by name. Values are always bound; no name ever comes from outside.

Place in the life of an execution: claim, checkpoint, finish.

An execution has a number (`key`) that the other tables refer to: a short key keeps their indexes small. `boundary` is
filled in the order of time and found through a narrow index, so that a batch of a thousand executions dirties a few
dozen pages and not a thousand. `head` holds what every step writes, and no index; what indexes hold stands in
`execution`, and is only written when it changes.
"""

from __future__ import annotations

from functools import cache

from longrun.stores.rows import DEFINITION_COLUMNS, MESSAGE_COLUMNS

APPLICATION_ID = 0x6C6F6E67
"""Marks a database file as longrun's own (`PRAGMA application_id`): "long" in ASCII."""

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('changes', 0);

CREATE TABLE execution (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    workflow TEXT NOT NULL,
    version TEXT NOT NULL,
    total INTEGER NOT NULL,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    parent_id TEXT,
    created REAL NOT NULL,
    definition_crc INTEGER NOT NULL,
    state TEXT NOT NULL,
    fence INTEGER NOT NULL,
    owner TEXT,
    ended REAL,
    woken INTEGER NOT NULL,
    messages INTEGER NOT NULL,     -- how many wait
    last_message INTEGER NOT NULL,
    wake REAL                      -- from when on it may be claimed: 0 at once, NULL never by itself
);
CREATE INDEX execution_created ON execution (created, id);
CREATE INDEX execution_state ON execution (state, created, id);
CREATE INDEX execution_workflow ON execution (workflow, created, id);
CREATE INDEX execution_queue ON execution (queue, created, id);
CREATE INDEX execution_parent ON execution (parent_id, created, id) WHERE parent_id IS NOT NULL;
CREATE INDEX execution_ended ON execution (ended) WHERE ended IS NOT NULL;
CREATE INDEX execution_owner ON execution (owner, state) WHERE owner IS NOT NULL;
CREATE INDEX execution_mail ON execution (owner) WHERE messages > 0;
CREATE INDEX execution_ready ON execution (priority DESC, created, id) WHERE owner IS NULL AND wake = 0;
CREATE INDEX execution_ready_queue ON execution (queue, priority DESC, created, id) WHERE owner IS NULL AND wake = 0;
CREATE INDEX execution_timed ON execution (wake) WHERE owner IS NULL AND wake > 0;

CREATE TABLE steps (execution INTEGER PRIMARY KEY, names TEXT NOT NULL, crc INTEGER NOT NULL);

CREATE TABLE head (
    execution INTEGER PRIMARY KEY,
    revision INTEGER NOT NULL,
    kept INTEGER NOT NULL,         -- no boundary before this number has its state
    numbers BLOB NOT NULL,         -- the other fields: see pack.py
    words TEXT NOT NULL,
    crc INTEGER NOT NULL           -- of all of the head, with what stands in `execution`
);

CREATE TABLE boundary (
    number INTEGER PRIMARY KEY,
    execution INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    numbers BLOB NOT NULL,         -- the other fields: see pack.py
    words TEXT NOT NULL,
    crc INTEGER NOT NULL,
    state_crc INTEGER,
    blobs TEXT,
    data BLOB
);
CREATE UNIQUE INDEX boundary_seq ON boundary (execution, seq);

CREATE TABLE blob (
    execution INTEGER NOT NULL, name TEXT NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX blob_name ON blob (execution, name);

CREATE TABLE entry (
    execution INTEGER NOT NULL, key TEXT NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX entry_key ON entry (execution, key);

CREATE TABLE message (
    execution INTEGER NOT NULL,
    id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name TEXT,
    key TEXT,
    payload BLOB,
    options TEXT,
    sent REAL NOT NULL,
    crc INTEGER NOT NULL,
    taken INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (execution, id)
) WITHOUT ROWID;
CREATE UNIQUE INDEX message_key ON message (execution, key) WHERE key IS NOT NULL;
CREATE INDEX message_taken ON message (execution, id) WHERE taken = 1;

CREATE TABLE owner (
    id TEXT PRIMARY KEY, life TEXT NOT NULL, workflows TEXT NOT NULL, queues TEXT NOT NULL, expires REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE quarantine (
    number INTEGER PRIMARY KEY,
    execution TEXT NOT NULL,
    part TEXT NOT NULL,
    found REAL NOT NULL,
    content TEXT NOT NULL,
    UNIQUE (execution, part, content)
);
"""


@cache
def for_many(statement: str, rows: int) -> str:
    """The statement with as many rows of values."""
    head, _, rest = statement.rpartition("VALUES ")
    values, bracket, tail = rest.partition(")")
    return f"{head}VALUES {','.join([values + bracket] * rows)}{tail}"


DEFINITION = ", ".join(DEFINITION_COLUMNS)
MESSAGE = ", ".join(MESSAGE_COLUMNS)

# the writer

_KNOWN = """
SELECT id, key, fence, revision, state, owner, ended, woken, wake, kept, messages, last_message,
    EXISTS (SELECT 1 FROM entry WHERE entry.execution = execution.key)
FROM execution JOIN head ON head.execution = execution.key WHERE id
"""
KNOWN = f"{_KNOWN} IN (SELECT value FROM json_each(?))"
KNOWN_ONE = f"{_KNOWN} = ?"
LAST_KEY = "SELECT coalesce(max(key), 0) FROM execution"
CREATE = f"""
INSERT INTO execution
    (key, {DEFINITION}, definition_crc, state, fence, owner, ended, woken, messages, last_message, wake)
VALUES ({", ".join("?" * (7 + len(DEFINITION_COLUMNS)))}, 0, 0, ?)
"""
START = """
INSERT INTO execution
    (key, id, workflow, version, total, queue, priority, created, definition_crc, fence, owner,
    metadata, state, woken, messages, last_message, wake)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '{}', 'running', 0, 0, 0, 0.0)
"""
"""As `CREATE`, for what runs at once and has neither parent nor metadata."""
CREATE_HEAD = "INSERT INTO head (execution, revision, kept, numbers, words, crc) VALUES (?, ?, 0, ?, ?, ?)"
ADD_STEPS = "INSERT INTO steps (execution, names, crc) VALUES (?, ?, ?)"
DEFINITIONS_OF = f"""
SELECT key, definition_crc, {DEFINITION} FROM execution WHERE key IN (SELECT value FROM json_each(?))
"""
SET_NAMED = """
UPDATE execution NOT INDEXED SET version = one.column2, total = one.column3, definition_crc = one.column4
FROM (VALUES (?, ?, ?, ?)) AS one WHERE key = one.column1
"""
"""By the key in any case, as all that is updated with many rows in one statement: statistics of a table that was small
once let SQLite search for it elsewhere."""
SET_STEPS = """
UPDATE steps NOT INDEXED SET names = one.column2, crc = one.column3
FROM (VALUES (?, ?, ?)) AS one WHERE execution = one.column1
"""
SAVE_HEAD = "INSERT OR REPLACE INTO head (revision, kept, numbers, words, crc, execution) VALUES (?, ?, ?, ?, ?, ?)"
MOVE = """
UPDATE execution NOT INDEXED
SET state = one.column2, fence = one.column3, owner = one.column4, ended = one.column5, woken = one.column6,
    messages = one.column7, last_message = one.column8, wake = one.column9
FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)) AS one WHERE key = one.column1
"""
GIVE = """
UPDATE execution NOT INDEXED
SET fence = one.column2, owner = one.column3, woken = 0, messages = one.column4, wake = one.column5
FROM (VALUES (?, ?, ?, ?, ?)) AS one WHERE key = one.column1
"""
"""As `MOVE`, for what is claimed and is otherwise as it was."""
FINISH = """
UPDATE execution NOT INDEXED
SET state = 'completed', owner = NULL, ended = one.column2, woken = 0, messages = 0, wake = NULL
FROM (VALUES (?, ?)) AS one WHERE key = one.column1
"""
"""As `MOVE`, for what comes to its end."""
ADD_BOUNDARY = """
INSERT INTO boundary (execution, seq, numbers, words, crc, state_crc, blobs, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
REPLACE_BOUNDARY = ADD_BOUNDARY.replace("INSERT", "INSERT OR REPLACE")
STRIP = """
UPDATE boundary SET data = NULL, blobs = NULL, state_crc = NULL
WHERE execution = ? AND seq >= ? AND seq < ? AND data IS NOT NULL
"""
ADD_BLOB = "INSERT OR REPLACE INTO blob (execution, name, crc, data) VALUES (?, ?, ?, ?)"
DROP_BLOB = "DELETE FROM blob WHERE execution = ? AND name = ?"
ADD_ENTRY = "INSERT OR REPLACE INTO entry (execution, key, crc, data) VALUES (?, ?, ?, ?)"
DROP_ENTRY = "DELETE FROM entry WHERE execution = ? AND key = ?"
CLEAR_ENTRIES = "DELETE FROM entry WHERE execution = ?"

ADD_MESSAGE = f"""
INSERT INTO message (execution, {MESSAGE}, crc) VALUES ({", ".join("?" * (2 + len(MESSAGE_COLUMNS)))})
"""
MESSAGE_OF_KEY = "SELECT id FROM message WHERE execution = ? AND key = ?"
LAST_MESSAGE = "SELECT last_message FROM execution WHERE id = ?"
KEYS_OF = """
SELECT message.key, message.id FROM message JOIN execution ON execution.key = message.execution
WHERE execution.id = ? AND message.key IS NOT NULL ORDER BY message.id
"""
TAKE_KEYED = """
UPDATE message SET taken = 1, payload = NULL, options = NULL
WHERE execution = ? AND id = ? AND key IS NOT NULL AND taken = 0
"""
TAKE_PLAIN = "DELETE FROM message WHERE execution = ? AND id = ? AND key IS NULL"
TAKE_ALL_KEYED = """
UPDATE message SET taken = 1, payload = NULL, options = NULL
WHERE execution = ? AND key IS NOT NULL AND taken = 0
"""
TAKE_ALL_PLAIN = "DELETE FROM message WHERE execution = ? AND key IS NULL"
FORGET_KEYS = """
DELETE FROM message WHERE execution = ? AND taken = 1 AND id <= (
    SELECT id FROM message WHERE execution = ? AND taken = 1 ORDER BY id DESC LIMIT 1 OFFSET ?)
"""
ANNOUNCE = "UPDATE meta SET value = value + 1 WHERE name = 'changes'"
CHANGES = "SELECT value FROM meta WHERE name = 'changes'"
TOUCH = "INSERT INTO meta VALUES ('touched', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"
"""Somebody changes an execution that another one owns: with a message, by taking it over, or by removing it."""
TOUCHED = "SELECT value FROM meta WHERE name = 'touched'"

FINISHED = """
SELECT id, key FROM execution
WHERE id IN (SELECT value FROM json_each(?)) AND state IN ('completed', 'failed', 'cancelled')
"""
STATES = "SELECT id, state FROM execution WHERE id IN (SELECT value FROM json_each(?))"
KEYS = "SELECT id, key FROM execution WHERE id IN (SELECT value FROM json_each(?))"
TABLES = {
    "boundary": "execution",
    "blob": "execution",
    "entry": "execution",
    "message": "execution",
    "steps": "execution",
    "head": "execution",
    "execution": "key",
}
"""Every table with rows of an execution, and the column that says of which."""
DELETE = tuple(
    f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))" for table, column in TABLES.items()
)
ALL_OF = {table: f"SELECT * FROM {table} WHERE {column} = ?" for table, column in TABLES.items()}

REGISTER = "INSERT OR REPLACE INTO owner (id, life, workflows, queues, expires) VALUES (?, ?, ?, ?, ?)"
RENEW = "UPDATE owner SET expires = ? WHERE id = ?"
UNREGISTER = "DELETE FROM owner WHERE id = ?"

# claims: each part finds the keys of one kind of candidate

NARROW_STATES = "+state IN (SELECT value FROM json_each(:states))"
NARROW_WORKFLOWS = "+workflow IN (SELECT value FROM json_each(:workflows))"
NARROW_QUEUES = "+queue IN (SELECT value FROM json_each(:queues))"
CANDIDATE = "SELECT key, priority, created, id FROM execution WHERE"
CLAIM_IDS = f"""
{CANDIDATE} id IN (SELECT value FROM json_each(:ids))
AND (owner IS NULL OR owner IN (SELECT value FROM json_each(:owners)))
"""
CLAIM_READY = f"{CANDIDATE} owner IS NULL AND wake = 0"
CLAIM_READY_QUEUE = f"{CANDIDATE} owner IS NULL AND wake = 0 AND queue = :queue{{n}}"
"""With the number of the queue put in, one select for each."""
CLAIM_TIMED = f"{CANDIDATE} owner IS NULL AND wake > 0 AND wake <= :now"
CLAIM_OWNED = f"{CANDIDATE} owner IN (SELECT value FROM json_each(:owners)) AND wake <= :now"
CLAIM_ORDER = "ORDER BY priority DESC, created, id LIMIT :limit"

NUMBERS = """
SELECT CAST(fence AS INTEGER), CAST(revision AS INTEGER), messages
FROM execution JOIN head ON head.execution = key WHERE key = ?
"""

# loading: the keys are a JSON list

LOAD_KEY = "SELECT key FROM execution WHERE id = ?"
LOAD_WHOLE = f"""
SELECT key, kept, last_message, names, steps.crc, definition_crc, {DEFINITION}, state, fence, revision, owner, woken,
    head.numbers, head.words, head.crc, newest.seq, newest.numbers, newest.words, newest.crc, state_crc, blobs, data,
    (SELECT group_concat(b.seq || ' ' || coalesce(b.blobs, ''), char(10)) FROM boundary AS b INDEXED BY boundary_seq
        WHERE b.execution = key AND b.seq >= kept AND b.data IS NOT NULL)
FROM execution LEFT JOIN head ON head.execution = key LEFT JOIN steps ON steps.execution = key
LEFT JOIN boundary AS newest INDEXED BY boundary_seq ON newest.execution = key
    AND newest.seq = (SELECT max(b.seq) FROM boundary AS b INDEXED BY boundary_seq WHERE b.execution = key)
WHERE key IN (SELECT value FROM json_each(?))
"""
"""One row an execution, with its newest boundary. The last column tells which boundaries have their state, a line each:
number, and names of blobs."""
LOAD_HEADS = f"""
SELECT key, definition_crc, names, steps.crc, {DEFINITION}, state, fence, revision, owner, woken,
    numbers, words, head.crc, kept, last_message
FROM execution LEFT JOIN head ON head.execution = key LEFT JOIN steps ON steps.execution = key
WHERE key IN (SELECT value FROM json_each(?))
"""
LOAD_KEPT = """
SELECT b.execution, b.number, b.seq, b.blobs, b.data IS NOT NULL
FROM head JOIN boundary AS b ON b.execution = head.execution AND b.seq >= kept
WHERE head.execution IN (SELECT value FROM json_each(?)) ORDER BY b.execution, b.seq
"""
LOAD_BOUNDARIES = """
SELECT execution, seq, numbers, words, crc, state_crc, blobs, data FROM boundary
WHERE number IN (SELECT value FROM json_each(?))
"""
LOAD_BLOBS = """
SELECT b.execution, b.name, b.crc, b.data FROM json_each(?) AS wanted
JOIN blob AS b ON b.execution = json_extract(wanted.value, '$[0]') AND b.name = json_extract(wanted.value, '$[1]')
"""
LOAD_ENTRIES = "SELECT execution, key, crc, data FROM entry WHERE execution IN (SELECT value FROM json_each(?))"
LOAD_MESSAGES = f"""
SELECT execution, crc, {MESSAGE} FROM message
WHERE execution IN (SELECT value FROM json_each(?)) AND taken = 0 ORDER BY execution, id
"""
ALL_BOUNDARIES = """
SELECT seq, numbers, words, crc, state_crc, blobs, data FROM boundary WHERE execution = ? ORDER BY seq DESC
"""
ALL_BLOBS = "SELECT name, crc, data FROM blob WHERE execution = ?"
STRIP_ONE = "UPDATE boundary SET data = NULL, blobs = NULL, state_crc = NULL WHERE execution = ? AND seq = ?"
DROP_MESSAGE = "DELETE FROM message WHERE execution = ? AND id = ?"
QUARANTINE = "INSERT OR IGNORE INTO quarantine (execution, part, found, content) VALUES (?, ?, ?, ?)"

# the other readers

LISTED = f"{DEFINITION}, state, fence, revision, owner, woken, numbers, words"
LISTING = "execution JOIN head ON head.execution = key"
BOUNDARIES = """
SELECT seq, numbers, words, boundary.crc, blobs FROM execution JOIN boundary ON boundary.execution = key
WHERE id = ? AND seq > ? ORDER BY seq LIMIT ?
"""
CHECKPOINT = """
SELECT key, seq, numbers, words, boundary.crc, state_crc, blobs, data
FROM execution JOIN boundary ON boundary.execution = key
WHERE id = ? AND seq = ? AND data IS NOT NULL
"""
PENDING = "SELECT id FROM execution WHERE owner = ? AND messages > 0"
OWNERS = "SELECT id, life, workflows, queues, expires FROM owner ORDER BY id"
READY_NOW = "SELECT 1 FROM execution WHERE owner IS NULL AND wake = 0 LIMIT 1"
NEXT_TIMED = "SELECT min(wake) FROM execution WHERE owner IS NULL AND wake > 0"
SIZE = """
SELECT length(metadata) + length(numbers)
    + (SELECT coalesce(sum(coalesce(length(data), 0) + length(numbers) + length(words)), 0)
        FROM boundary WHERE execution = execution.key)
    + (SELECT coalesce(sum(length(data)), 0) FROM blob WHERE execution = execution.key)
    + (SELECT coalesce(sum(length(data)), 0) FROM entry WHERE execution = execution.key)
    + (SELECT coalesce(sum(length(payload)), 0) FROM message WHERE execution = execution.key)
FROM execution JOIN head ON head.execution = key WHERE id = ?
"""
