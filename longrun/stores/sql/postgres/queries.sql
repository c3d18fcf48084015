-- Every statement of the store, by name. {schema} is replaced by the quoted schema, and values are always bound.
--
-- A batch of saves is one statement: "save" decides which of them fit, and each part that the batch needs is added
-- behind it and looks into "applied", so that a refused save changes nothing. "create" is the same with new rows.
-- "IN (...) IS TRUE" makes the server look ids up in a hash table; as a join it would compare all pairs, since it
-- cannot know how long the arrays will be. For a batch with one row of each part, "unnest (...)" is read as that one row
-- and "IN (...) IS TRUE" as "EXISTS (...)", since there is one id only.

-- name: save
WITH applied AS (
    UPDATE {schema}.heads AS h SET
        state = w.state, revision = w.revision, owner = w.owner, seq = w.seq, step = w.step, visit = w.visit,
        iteration = w.iteration, attempt = w.attempt, started = w.started, updated = w.updated, ended = w.ended,
        due = w.due, signal = w.signal, woken = w.woken {or_woken}, hold = w.hold, crashes = w.crashes,
        error = w.error, reason = w.reason, progress = w.progress, done = w.done, "of" = w."of", note = w.note,
        crc = w.crc
    FROM unnest(
        %(id)s, %(crc)s, %(state)s, %(fence)s, %(revision)s, %(owner)s, %(seq)s, %(step)s, %(visit)s, %(iteration)s,
        %(attempt)s, %(started)s, %(updated)s, %(ended)s, %(due)s, %(signal)s, %(woken)s, %(hold)s, %(crashes)s,
        %(error)s, %(reason)s, %(progress)s, %(done)s, %(of)s, %(note)s
    ) AS w (
        id, crc, state, fence, revision, owner, seq, step, visit, iteration, attempt, started, updated, ended, due,
        signal, woken, hold, crashes, error, reason, progress, done, "of", note
    )
    WHERE h.id = w.id AND h.fence = w.fence AND h.revision = w.revision - 1 {unless}
    RETURNING h.id
)

-- name: unless_written_to
-- What is let go and may have messages needs a second statement, and so a transaction. Whoever sends one locks the row
-- and counts it there, so this is seen as it is, however long the save waited for the row.
AND (h.last_message = 0 OR w.owner IS NOT NULL AND w.state NOT IN ('completed', 'failed', 'cancelled'))

-- name: unless_crossed
-- The same for what takes messages: it had some. The statement sees the messages as they were when it began, and the row
-- as it is once it is locked; where both know the same last one, none was sent between.
AND (
    h.last_message = (SELECT p.last_message FROM {schema}.heads AS p WHERE p.id = w.id)
    OR w.owner IS NOT NULL AND w.state NOT IN ('completed', 'failed', 'cancelled')
)

-- name: or_woken
OR w.owner IS NULL AND w.state NOT IN ('completed', 'failed', 'cancelled') AND EXISTS (
    SELECT FROM {schema}.messages AS m
    WHERE m.execution = w.id AND (m.execution, m.id) NOT IN (SELECT * FROM unnest(%(take_execution)s, %(take_id)s) AS t)
)

-- name: move
-- A batch of moves: from a step that ended at its first attempt to the one behind it, or to the end. One row has all of
-- it, and the tables that follow are filled from what was applied.
WITH applied AS (
    UPDATE {schema}.heads AS h SET
        state = {state}, revision = w.revision, owner = w.owner, seq = w.seq, step = w.next, visit = w.visit,
        iteration = 0, attempt = 0, started = {started}, updated = w.ended, ended = {ended}, due = NULL, signal = NULL,
        woken = false, hold = false, crashes = 0, error = NULL, reason = NULL, progress = w.progress, done = 0,
        "of" = NULL, note = NULL, crc = w.crc
    FROM unnest(
        %(id)s, %(fence)s, %(revision)s, %(owner)s, %(progress)s, %(crc)s, %(b_seq)s, %(b_name)s, %(b_started)s,
        %(b_ended)s, %(b_next)s, %(b_visit)s, %(b_crc)s, %(s_data)s, %(s_crc)s {value}
    ) AS w (
        id, fence, revision, owner, progress, crc, seq, name, started, ended, next, visit, b_crc, data, s_crc {name}
    )
    WHERE h.id = w.id AND h.fence = w.fence AND h.revision = w.revision - 1 {unless}
    RETURNING w.*
), bounded AS (
    INSERT INTO {schema}.boundaries (
        execution, seq, kind, step, name, started, ended, attempts, next, visit, iteration, size, crc
    )
    SELECT id, seq, {kind}, next - 1, name, started, ended, 1, next, visit, 0, octet_length(data), b_crc FROM applied
), stated AS (
    INSERT INTO {schema}.states (execution, seq, data, crc) SELECT id, seq, data, s_crc FROM applied
)

-- name: move_and_strip
, stripped AS (
    DELETE FROM {schema}.states AS s USING applied AS a WHERE s.execution = a.id AND s.seq < a.strip_before
)

-- name: move_and_clear
-- Neither progress nor messages are left of what has ended; what was ever sent a message ends in another way.
, cleared AS (
    DELETE FROM {schema}.entries AS e USING applied AS a WHERE e.execution = a.id
)

-- name: unless_sent_to
AND h.last_message = 0

-- name: create
WITH applied AS (
    INSERT INTO {schema}.heads (
        id, crc, state, fence, revision, owner, seq, step, visit, iteration, attempt, started, updated, ended, due,
        signal, woken, hold, crashes, error, reason, progress, done, "of", note, workflow, queue, priority, parent_id,
        created
    )
    SELECT * FROM unnest(
        %(id)s, %(crc)s, %(state)s, %(fence)s, %(revision)s, %(owner)s, %(seq)s, %(step)s, %(visit)s, %(iteration)s,
        %(attempt)s, %(started)s, %(updated)s, %(ended)s, %(due)s, %(signal)s, %(woken)s, %(hold)s, %(crashes)s,
        %(error)s, %(reason)s, %(progress)s, %(done)s, %(of)s, %(note)s, %(workflow)s, %(queue)s, %(priority)s,
        %(parent_id)s, %(created)s
    ) AS w
    ON CONFLICT (id) DO NOTHING
    RETURNING id
), defined AS (
    INSERT INTO {schema}.definitions (id, version, total, metadata, steps, labels, search, token, crc, steps_crc)
    SELECT d.id, d.version, d.total, d.metadata, d.steps, d.labels::jsonb, d.search, d.token, d.crc, d.steps_crc
    FROM unnest(
        %(id)s, %(version)s, %(total)s, %(metadata)s, %(steps)s, %(labels)s, %(search)s, %(token)s,
        %(definition_crc)s, %(steps_crc)s
    ) AS d (id, version, total, metadata, steps, labels, search, token, crc, steps_crc)
    WHERE (d.id IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_boundaries
, bounded AS (
    INSERT INTO {schema}.boundaries (
        execution, seq, kind, step, name, started, ended, attempts, error, next, visit, iteration, size, crc
    )
    SELECT b.* FROM unnest(
        %(b_execution)s, %(b_seq)s, %(b_kind)s, %(b_step)s, %(b_name)s, %(b_started)s, %(b_ended)s, %(b_attempts)s,
        %(b_error)s, %(b_next)s, %(b_visit)s, %(b_iteration)s, %(b_size)s, %(b_crc)s
    ) AS b (
        execution, seq, kind, step, name, started, ended, attempts, error, next, visit, iteration, size, crc
    )
    WHERE (b.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_states
, stated AS (
    INSERT INTO {schema}.states (execution, seq, blobs, data, crc)
    SELECT s.* FROM unnest(%(s_execution)s, %(s_seq)s, %(s_blobs)s, %(s_data)s, %(s_crc)s)
        AS s (execution, seq, blobs, data, crc)
    WHERE (s.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_blobs
, blobbed AS (
    INSERT INTO {schema}.blobs (execution, name, data, crc)
    SELECT n.* FROM unnest(%(blob_execution)s, %(blob_name)s, %(blob_data)s, %(blob_crc)s)
        AS n (execution, name, data, crc)
    WHERE (n.execution IN (SELECT id FROM applied)) IS TRUE
    ON CONFLICT (execution, name) DO UPDATE SET data = excluded.data, crc = excluded.crc
)

-- name: with_strips
, stripped AS (
    DELETE FROM {schema}.states AS s
    USING unnest(%(strip_execution)s, %(strip_before)s) AS o (execution, before)
    WHERE s.execution = o.execution AND s.seq < o.before AND (o.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_drop_blobs
, unblobbed AS (
    DELETE FROM {schema}.blobs AS b
    USING unnest(%(drop_blob_execution)s, %(drop_blob_name)s) AS o (execution, name)
    WHERE b.execution = o.execution AND b.name = o.name AND (o.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_clears
, cleared AS (
    DELETE FROM {schema}.entries AS e
    USING unnest(%(clear_execution)s) AS o (execution)
    WHERE e.execution = o.execution AND (o.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_clears_around_puts
, cleared AS (
    DELETE FROM {schema}.entries AS e
    USING unnest(%(clear_execution)s) AS o (execution)
    WHERE e.execution = o.execution AND (o.execution IN (SELECT id FROM applied)) IS TRUE
    AND (e.execution, e.key) NOT IN (SELECT * FROM unnest(%(put_execution)s, %(put_key)s) AS p)
)

-- name: with_drops
, dropped AS (
    DELETE FROM {schema}.entries AS e
    USING unnest(%(drop_execution)s, %(drop_key)s) AS o (execution, key)
    WHERE e.execution = o.execution AND e.key = o.key AND (o.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_puts
, put AS (
    INSERT INTO {schema}.entries (execution, key, data, crc)
    SELECT n.* FROM unnest(%(put_execution)s, %(put_key)s, %(put_data)s, %(put_crc)s)
        AS n (execution, key, data, crc)
    WHERE (n.execution IN (SELECT id FROM applied)) IS TRUE
    ON CONFLICT (execution, key) DO UPDATE SET data = excluded.data, crc = excluded.crc
)

-- name: with_takes
, taken AS (
    DELETE FROM {schema}.messages AS m
    USING unnest(%(take_execution)s, %(take_id)s) AS o (execution, id)
    WHERE m.execution = o.execution AND m.id = o.id AND (o.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_sweeps
, swept AS (
    DELETE FROM {schema}.messages AS m
    USING unnest(%(sweep_execution)s) AS o (execution)
    WHERE m.execution = o.execution AND (o.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: with_steps
, named AS (
    UPDATE {schema}.definitions AS d
    SET steps = n.steps, steps_crc = n.steps_crc, version = n.version, total = n.total, crc = n.crc
    FROM unnest(%(n_execution)s, %(n_steps)s, %(n_steps_crc)s, %(n_version)s, %(n_total)s, %(n_crc)s)
        AS n (execution, steps, steps_crc, version, total, crc)
    WHERE d.id = n.execution AND (n.execution IN (SELECT id FROM applied)) IS TRUE
)

-- name: answer
SELECT array_agg(id) FROM applied

-- name: answer_and_tell
SELECT array_agg(id), pg_notify(%(channel)s, %(teller)s) FROM applied

-- name: definitions_of
SELECT h.id, h.workflow, d.version, d.total, h.queue, h.priority, d.metadata, h.parent_id, h.created, d.crc
FROM {schema}.heads AS h JOIN {schema}.definitions AS d ON d.id = h.id WHERE h.id = ANY(%(ids)s)

-- name: wake_released
-- In a statement of its own: it must see messages that were sent while the save waited for the row.
UPDATE {schema}.heads AS h SET woken = true
WHERE h.id = ANY(%(ids)s) AND h.owner IS NULL
AND EXISTS (SELECT FROM {schema}.messages AS m WHERE m.execution = h.id)

-- name: sweep_ended
-- The same: no message stays with what has ended.
DELETE FROM {schema}.messages WHERE execution = ANY(%(ids)s)

-- name: positions
SELECT id, fence, revision FROM {schema}.heads WHERE id = ANY(%(ids)s)

-- name: created_by
SELECT d.id FROM {schema}.definitions AS d
JOIN unnest(%(ids)s, %(tokens)s) AS w (id, token) ON d.id = w.id AND d.token = w.token

-- name: lock_receivers
SELECT id, last_message FROM {schema}.heads WHERE id = ANY(%(ids)s) ORDER BY id FOR UPDATE

-- name: known_of
-- Which numbers were given for a token or a key; and, in rows without a token, how many messages wait.
SELECT r.execution, r.id, r.token, r.key FROM {schema}.receipts AS r
JOIN unnest(%(ids)s, %(tokens)s) AS w (execution, token) ON r.execution = w.execution AND r.token = w.token
UNION ALL
SELECT r.execution, r.id, r.token, r.key FROM {schema}.receipts AS r
JOIN unnest(%(ids)s, %(keys)s) AS w (execution, key) ON r.execution = w.execution AND r.key = w.key
UNION ALL
SELECT execution, count(*), NULL, NULL FROM {schema}.messages WHERE execution = ANY(%(ids)s) GROUP BY execution

-- name: receive
-- A send without a key is only ever repeated within one call, so its receipt need not last.
WITH added AS (
    INSERT INTO {schema}.messages (execution, id, kind, name, key, payload, options, sent, crc)
    SELECT * FROM unnest(
        %(execution)s, %(id)s, %(kind)s, %(name)s, %(key)s, %(payload)s, %(options)s, %(sent)s, %(crc)s
    )
), noted AS (
    INSERT INTO {schema}.receipts (execution, id, token, key)
    SELECT * FROM unnest(%(execution)s, %(id)s, %(token)s, %(key)s)
), forgotten AS (
    DELETE FROM {schema}.receipts AS r
    USING unnest(%(ids)s, %(last)s) AS w (execution, last)
    WHERE r.execution = w.execution AND r.key IS NULL AND r.id <= w.last - %(keep)s
), received AS (
    UPDATE {schema}.heads AS h SET
        last_message = w.last,
        woken = h.woken OR (h.owner IS NULL AND h.state NOT IN ('completed', 'failed', 'cancelled'))
    FROM unnest(%(ids)s, %(last)s) AS w (id, last)
    WHERE h.id = w.id
)
SELECT pg_notify(%(channel)s, %(teller)s)

-- name: look_at_receiver
-- The number of its last message, how many wait, and which number was given for a token or a key.
SELECT h.last_message, (SELECT count(*) FROM {schema}.messages AS m WHERE m.execution = h.id),
    (SELECT r.id FROM {schema}.receipts AS r WHERE r.execution = h.id AND r.token = %(token)s),
    (SELECT r.id FROM {schema}.receipts AS r WHERE r.execution = h.id AND r.key = %(key)s)
FROM {schema}.heads AS h WHERE h.id = %(execution)s

-- name: receive_next
-- One message, if its number is still the next: then what was seen of the receiver is still so.
WITH received AS (
    UPDATE {schema}.heads AS h SET
        last_message = %(id)s,
        woken = h.woken OR (h.owner IS NULL AND h.state NOT IN ('completed', 'failed', 'cancelled'))
    WHERE h.id = %(execution)s AND h.last_message = %(id)s - 1
    RETURNING h.id
), added AS (
    INSERT INTO {schema}.messages (execution, id, kind, name, key, payload, options, sent, crc)
    SELECT w.id, %(id)s::bigint, %(kind)s::text, %(name)s::text, %(key)s::text, %(payload)s::bytea, %(options)s::text,
        %(sent)s::double precision, %(crc)s::bigint
    FROM received AS w
), noted AS (
    INSERT INTO {schema}.receipts (execution, id, token, key)
    SELECT w.id, %(id)s::bigint, %(token)s::bigint, %(key)s::text FROM received AS w
), forgotten AS (
    DELETE FROM {schema}.receipts AS r USING received AS w
    WHERE r.execution = w.id AND r.key IS NULL AND r.id <= %(id)s - %(keep)s
)
SELECT w.id, pg_notify(%(channel)s, %(teller)s) FROM received AS w

-- name: forget_keys
DELETE FROM {schema}.receipts AS r
USING unnest(%(ids)s, %(keep)s) AS w (execution, keep)
WHERE r.execution = w.execution AND r.key IS NOT NULL AND r.id <= (
    SELECT o.id FROM {schema}.receipts AS o
    WHERE o.execution = w.execution AND o.key IS NOT NULL ORDER BY o.id DESC OFFSET w.keep LIMIT 1
)

-- name: claim_due
-- What nobody owns, ready or slept out, and what the dead own. Each branch skips what others hold.
WITH ready AS MATERIALIZED (
    SELECT id, priority, created FROM {schema}.heads
    WHERE owner IS NULL AND wake <= 0 AND state = ANY(%(states)s)
    AND (%(workflows)s::text[] IS NULL OR workflow = ANY(%(workflows)s))
    AND (%(queues)s::text[] IS NULL OR queue = ANY(%(queues)s))
    ORDER BY priority DESC, created, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), slept AS MATERIALIZED (
    SELECT id, priority, created FROM {schema}.heads
    WHERE owner IS NULL AND wake > 0 AND wake <= %(now)s AND state = ANY(%(states)s)
    AND (%(workflows)s::text[] IS NULL OR workflow = ANY(%(workflows)s))
    AND (%(queues)s::text[] IS NULL OR queue = ANY(%(queues)s))
    ORDER BY priority DESC, created, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), left_over AS MATERIALIZED (
    SELECT id, priority, created FROM {schema}.heads
    WHERE owner = ANY(%(owners)s) AND wake <= %(now)s AND state = ANY(%(states)s)
    AND (%(workflows)s::text[] IS NULL OR workflow = ANY(%(workflows)s))
    AND (%(queues)s::text[] IS NULL OR queue = ANY(%(queues)s))
    ORDER BY priority DESC, created, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
SELECT f.ids, set_config('longrun.claimed', coalesce(f.ids, '{}')::text, true) FROM (
    SELECT array_agg(c.id ORDER BY c.priority DESC, c.created, c.id) AS ids FROM (
        SELECT * FROM ready UNION ALL SELECT * FROM slept UNION ALL SELECT * FROM left_over
        ORDER BY priority DESC, created, id LIMIT %(limit)s
    ) AS c
) AS f

-- name: claim_these
-- A row that is locked for a moment is waited for: whoever names an execution wants that one.
WITH named AS MATERIALIZED (
    SELECT id, priority, created FROM {schema}.heads
    WHERE id = ANY(%(ids)s) AND (owner IS NULL OR owner = ANY(%(owners)s)) AND state = ANY(%(states)s)
    AND (%(workflows)s::text[] IS NULL OR workflow = ANY(%(workflows)s))
    AND (%(queues)s::text[] IS NULL OR queue = ANY(%(queues)s))
    ORDER BY priority DESC, created, id LIMIT %(limit)s FOR UPDATE
)
SELECT f.ids, set_config('longrun.claimed', coalesce(f.ids, '{}')::text, true) FROM (
    SELECT array_agg(n.id ORDER BY n.priority DESC, n.created, n.id) AS ids FROM named AS n
) AS f

-- name: claim_lock
-- Held to the end of the claim, so that a repetition waits until the outcome of the first attempt is known.
SELECT pg_advisory_xact_lock(%(token)s)

-- name: claim_plans
-- On a connection that is not the store's own, for the time of the claim: what `WRITER_SETTINGS` say.
SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true),
    set_config('jit', 'off', true)

-- name: claimed_by
SELECT id FROM {schema}.heads
WHERE owner = %(owner)s AND claim_token = %(token)s ORDER BY priority DESC, created, id

-- name: claim
-- Of a head that fits its checksum a claim changes no more than this.
UPDATE {schema}.heads AS h SET
    fence = w.fence, owner = %(owner)s, woken = false, crashes = w.crashes, crc = w.crc, claim_token = %(token)s
FROM unnest(%(id)s, %(fence)s, %(crashes)s, %(crc)s) AS w (id, fence, crashes, crc)
WHERE h.id = w.id

-- name: mend_head
UPDATE {schema}.heads AS h SET
    state = w.state, fence = w.fence, revision = w.revision, owner = w.owner, seq = w.seq, step = w.step,
    visit = w.visit, iteration = w.iteration, attempt = w.attempt, started = w.started, updated = w.updated,
    ended = w.ended, due = w.due, signal = w.signal, woken = w.woken, hold = w.hold, crashes = w.crashes,
    error = w.error, reason = w.reason, progress = w.progress, done = w.done, "of" = w."of", note = w.note,
    crc = w.crc
FROM unnest(
    %(id)s, %(crc)s, %(state)s, %(fence)s, %(revision)s, %(owner)s, %(seq)s, %(step)s, %(visit)s, %(iteration)s,
    %(attempt)s, %(started)s, %(updated)s, %(ended)s, %(due)s, %(signal)s, %(woken)s, %(hold)s, %(crashes)s,
    %(error)s, %(reason)s, %(progress)s, %(done)s, %(of)s, %(note)s
) AS w (
    id, crc, state, fence, revision, owner, seq, step, visit, iteration, attempt, started, updated, ended, due,
    signal, woken, hold, crashes, error, reason, progress, done, "of", note
)
WHERE h.id = w.id

-- name: load
-- One row for each execution: its definition, its head, the numbers of its states, and the newest of them. Each table is
-- asked for one id after the other, whatever the planner thinks of their size (of EXISTS it would make a look at all).
-- Without ids: what was claimed just now in the same transaction. After it the setting is an empty text, which the
-- planner reads whether there are ids or not.
SELECT h.id, h.workflow, d.version, d.total, h.queue, h.priority, d.metadata, h.parent_id, h.created,
    d.crc, d.steps, d.steps_crc,
    h.state, h.fence, h.revision, h.owner, h.seq, h.step, h.visit, h.iteration, h.attempt, h.started, h.updated,
    h.ended, h.due, h.signal, h.woken, h.hold, h.crashes, h.error, h.reason, h.progress, h.done, h."of", h.note, h.crc,
    b.seq, b.kind, b.step, b.name, b.started, b.ended, b.attempts, b.error, b.next, b.visit, b.iteration, b.size,
    s.blobs, s.data, b.crc, s.crc,
    (SELECT coalesce(max(l.seq), 0) FROM {schema}.boundaries AS l WHERE l.execution = h.id),
    k.numbers, k.blobs,
    (SELECT 1 FROM {schema}.entries AS e WHERE e.execution = h.id LIMIT 1),
    (SELECT 1 FROM {schema}.messages AS m WHERE m.execution = h.id LIMIT 1)
FROM {schema}.heads AS h
LEFT JOIN LATERAL (SELECT * FROM {schema}.definitions AS o WHERE o.id = h.id LIMIT 1) AS d ON true
LEFT JOIN LATERAL (
    SELECT * FROM {schema}.states AS n WHERE n.execution = h.id ORDER BY n.seq DESC LIMIT 1
) AS s ON true
LEFT JOIN LATERAL (
    SELECT * FROM {schema}.boundaries AS n WHERE n.execution = h.id AND n.seq = s.seq LIMIT 1
) AS b ON true
CROSS JOIN LATERAL (
    SELECT array_agg(n.seq ORDER BY n.seq) AS numbers, array_agg(n.blobs ORDER BY n.seq) AS blobs
    FROM {schema}.states AS n WHERE n.execution = h.id
) AS k
WHERE h.id = ANY(coalesce(%(ids)s::text[], nullif(current_setting('longrun.claimed', true), '')::text[]))

-- name: load_head
SELECT h.state, h.fence, h.revision, h.owner, h.seq, h.step, h.visit, h.iteration, h.attempt, h.started, h.updated,
    h.ended, h.due, h.signal, h.woken, h.hold, h.crashes, h.error, h.reason, h.progress, h.done, h."of", h.note, h.crc
FROM {schema}.heads AS h WHERE h.id = %(id)s

-- name: load_boundaries
SELECT b.seq, b.kind, b.step, b.name, b.started, b.ended, b.attempts, b.error, b.next, b.visit, b.iteration, b.size,
    s.blobs, s.data, b.crc, s.crc
FROM {schema}.boundaries AS b LEFT JOIN {schema}.states AS s ON s.execution = b.execution AND s.seq = b.seq
WHERE b.execution = %(id)s ORDER BY b.seq DESC

-- name: load_all_blobs
SELECT name, data, crc FROM {schema}.blobs WHERE execution = %(id)s

-- name: load_blobs
SELECT b.execution, b.name, b.data, b.crc FROM {schema}.blobs AS b
JOIN unnest(%(executions)s, %(names)s) AS w (execution, name) ON b.execution = w.execution AND b.name = w.name

-- name: load_entries
SELECT execution, key, data, crc FROM {schema}.entries WHERE execution = ANY(%(ids)s)

-- name: load_messages
SELECT execution, id, kind, name, key, payload, options, sent, crc FROM {schema}.messages
WHERE execution = ANY(%(ids)s) ORDER BY execution, id

-- name: quarantine
INSERT INTO {schema}.quarantine (execution, part, digest, content)
VALUES (%(id)s, %(part)s, md5(%(content)s), %(content)s) ON CONFLICT DO NOTHING

-- name: retire_states
-- Newer ones that nobody can go on from, whole as some of them may be: a part of the checkpoint is damaged elsewhere.
WITH retired AS (DELETE FROM {schema}.states WHERE execution = %(id)s AND seq > %(seq)s RETURNING *)
INSERT INTO {schema}.quarantine (execution, part, digest, content)
SELECT r.execution, 'state/' || r.seq, md5(row_to_json(r)::text), row_to_json(r)::text FROM retired AS r
ON CONFLICT DO NOTHING

-- name: states_of
SELECT id, state FROM {schema}.heads WHERE id = ANY(%(ids)s)

-- name: last_message
SELECT last_message FROM {schema}.heads WHERE id = %(id)s

-- name: keys_of
SELECT key, id FROM {schema}.receipts WHERE execution = %(id)s AND key IS NOT NULL ORDER BY id

-- name: remove_message
DELETE FROM {schema}.messages WHERE execution = %(id)s AND id = %(number)s

-- name: remove_entries
DELETE FROM {schema}.entries WHERE execution = %(id)s

-- name: block
-- Nothing of it can be read, so nobody can go on with it; left as it was, it would be claimed for ever.
UPDATE {schema}.heads SET state = 'blocked', owner = NULL, woken = false, fence = fence + 1, reason = %(reason)s
WHERE id = %(id)s

-- name: boundaries
SELECT b.seq, b.kind, b.step, b.name, b.started, b.ended, b.attempts, b.error, b.next, b.visit, b.iteration, b.size,
    s.blobs, NULL
FROM {schema}.boundaries AS b LEFT JOIN {schema}.states AS s ON s.execution = b.execution AND s.seq = b.seq
WHERE b.execution = %(id)s AND b.seq > %(after)s ORDER BY b.seq LIMIT %(limit)s

-- name: checkpoint
SELECT b.seq, b.kind, b.step, b.name, b.started, b.ended, b.attempts, b.error, b.next, b.visit, b.iteration, b.size,
    s.blobs, s.data, b.crc, s.crc
FROM {schema}.boundaries AS b JOIN {schema}.states AS s ON s.execution = b.execution AND s.seq = b.seq
WHERE b.execution = %(id)s AND b.seq = %(seq)s

-- name: find
SELECT h.id, h.workflow, d.version, d.total, h.queue, h.priority, d.metadata, h.parent_id, h.created,
    h.state, h.fence, h.revision, h.owner, h.seq, h.step, h.visit, h.iteration, h.attempt, h.started, h.updated,
    h.ended, h.due, h.signal, h.woken, h.hold, h.crashes, h.error, h.reason, h.progress, h.done, h."of", h.note
FROM {schema}.heads AS h JOIN {schema}.definitions AS d ON d.id = h.id
WHERE {conditions}
ORDER BY h.created DESC, h.id DESC LIMIT %(limit)s

-- name: count
SELECT h.state, count(*) FROM {schema}.heads AS h WHERE {conditions} GROUP BY h.state

-- name: count_with_definitions
SELECT h.state, count(*) FROM {schema}.heads AS h JOIN {schema}.definitions AS d ON d.id = h.id
WHERE {conditions} GROUP BY h.state

-- name: pending
SELECT h.id FROM {schema}.heads AS h
WHERE h.owner = %(owner)s AND EXISTS (SELECT FROM {schema}.messages AS m WHERE m.execution = h.id)

-- name: next_due
SELECT CASE
    WHEN EXISTS (SELECT FROM {schema}.heads WHERE owner IS NULL AND wake <= 0) THEN 0
    ELSE (SELECT min(wake) FROM {schema}.heads WHERE owner IS NULL AND wake > 0)
END

-- name: size
SELECT (SELECT coalesce(sum(pg_column_size(h)), 0) FROM {schema}.heads AS h WHERE id = %(id)s)
    + (SELECT coalesce(sum(pg_column_size(d)), 0) FROM {schema}.definitions AS d WHERE id = %(id)s)
    + (SELECT coalesce(sum(pg_column_size(b)), 0) FROM {schema}.boundaries AS b WHERE execution = %(id)s)
    + (SELECT coalesce(sum(octet_length(payload)), 0) FROM {schema}.messages WHERE execution = %(id)s)
    + (SELECT coalesce(sum(octet_length(data)), 0) FROM {schema}.states WHERE execution = %(id)s)
    + (SELECT coalesce(sum(octet_length(data)), 0) FROM {schema}.blobs WHERE execution = %(id)s)
    + (SELECT coalesce(sum(octet_length(data)), 0) FROM {schema}.entries WHERE execution = %(id)s)

-- name: register
INSERT INTO {schema}.owners (id, life, workflows, queues, expires)
VALUES (%(id)s, %(life)s, %(workflows)s, %(queues)s, clock_timestamp() + make_interval(secs => %(ttl)s))
ON CONFLICT (id) DO UPDATE SET
    life = excluded.life, workflows = excluded.workflows, queues = excluded.queues, expires = excluded.expires

-- name: renew
UPDATE {schema}.owners SET expires = clock_timestamp() + make_interval(secs => %(ttl)s)
WHERE id = %(id)s RETURNING id

-- name: unregister
DELETE FROM {schema}.owners WHERE id = %(id)s

-- name: owners
SELECT id, life, workflows, queues, extract(epoch FROM expires - clock_timestamp())::double precision
FROM {schema}.owners ORDER BY id

-- name: lock_finished
SELECT id FROM {schema}.heads
WHERE id = ANY(%(ids)s) AND state IN ('completed', 'failed', 'cancelled') ORDER BY id FOR UPDATE

-- name: lock_all
SELECT id FROM {schema}.heads WHERE id = ANY(%(ids)s) ORDER BY id FOR UPDATE

-- name: set_all_aside
-- Every row of executions that nobody can read, before they go.
INSERT INTO {schema}.quarantine (execution, part, digest, content)
SELECT execution, left('deleted/' || part, 200), md5(content), content FROM (
    SELECT id, 'head', row_to_json(t)::text FROM {schema}.heads AS t WHERE id = ANY(%(ids)s)
    UNION ALL
    SELECT id, 'definition', row_to_json(t)::text FROM {schema}.definitions AS t WHERE id = ANY(%(ids)s)
    UNION ALL
    SELECT execution, 'boundary/' || seq, row_to_json(t)::text
    FROM {schema}.boundaries AS t WHERE execution = ANY(%(ids)s)
    UNION ALL
    SELECT execution, 'state/' || seq, row_to_json(t)::text FROM {schema}.states AS t WHERE execution = ANY(%(ids)s)
    UNION ALL
    SELECT execution, 'blob/' || name, row_to_json(t)::text FROM {schema}.blobs AS t WHERE execution = ANY(%(ids)s)
    UNION ALL
    SELECT execution, 'entry/' || key, row_to_json(t)::text FROM {schema}.entries AS t WHERE execution = ANY(%(ids)s)
    UNION ALL
    SELECT execution, 'message/' || id, row_to_json(t)::text FROM {schema}.messages AS t WHERE execution = ANY(%(ids)s)
) AS r (execution, part, content)
ON CONFLICT DO NOTHING

-- name: delete
WITH a AS (DELETE FROM {schema}.heads WHERE id = ANY(%(ids)s)),
    b AS (DELETE FROM {schema}.boundaries WHERE execution = ANY(%(ids)s)),
    c AS (DELETE FROM {schema}.states WHERE execution = ANY(%(ids)s)),
    d AS (DELETE FROM {schema}.blobs WHERE execution = ANY(%(ids)s)),
    e AS (DELETE FROM {schema}.entries WHERE execution = ANY(%(ids)s)),
    f AS (DELETE FROM {schema}.messages WHERE execution = ANY(%(ids)s)),
    g AS (DELETE FROM {schema}.receipts WHERE execution = ANY(%(ids)s))
DELETE FROM {schema}.definitions WHERE id = ANY(%(ids)s)

-- name: facts
SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'),
    current_setting('full_page_writes'), pg_is_in_recovery()
