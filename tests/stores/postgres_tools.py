"""What several test files do to a PostgreSQL store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import psycopg

from longrun.stored import Write
from longrun.stores._postgres import arrays
from longrun.stores._postgres.batch import Batch
from longrun.stores.base import Answer
from longrun.stores.postgres import PostgresBackend
from longrun.testing.samples import send

WAITS_FOR_LOCK = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"


def committed_while_sending(backend: PostgresBackend, url: str, id: str, writes: Sequence[Write]) -> list[Answer]:
    """Answers to `writes`, of which one waits for the row of an execution that a message is being sent to: the sender
    holds its lock when they begin, so that what their statement saw of it is out of date when they go on."""
    answers: list[Answer] = []
    committing = threading.Thread(target=lambda: answers.extend(backend.commit(writes)))
    assert backend._links._writer is not None
    writer = backend._links._writer.info.backend_pid
    with psycopg.connect(url) as sender, psycopg.connect(url, autocommit=True) as looker:
        arrays.teach(sender)
        with sender.transaction():
            Batch([send(id)], backend._queries).apply(sender)
            committing.start()
            while looker.execute(WAITS_FOR_LOCK, (writer,)).rowcount == 0:
                assert committing.is_alive()
    committing.join()
    return answers
