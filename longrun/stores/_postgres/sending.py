"""Messages: appended under the lock of the receiver's row, which gives each its number.

Place in the life of an execution: signals and control requests, from anybody, at any time.
"""

from __future__ import annotations

from typing import Any

import attrs

from longrun.errors import ExecutionNotFoundError, SignalQueueFullError
from longrun.stored import Send
from longrun.stores import rows
from longrun.stores._postgres.arrays import Blobs, Column, Floats, Ints, Texts, columns
from longrun.stores._postgres.links import Connection
from longrun.stores._postgres.queries import Queries
from longrun.stores.base import KEYS_REMEMBERED, Answer

TOKENS_REMEMBERED = KEYS_REMEMBERED
"""So many others may come to the same execution before a send whose answer was lost is repeated, and known again."""

_NAMES = ("execution", *rows.MESSAGE_COLUMNS, "crc", "token")
_KINDS: tuple[type[Column], ...] = (Texts, Ints, Texts, Texts, Texts, Blobs, Texts, Floats, Ints, Ints)

Sends = dict[int, tuple[Send, int]]
"""Place in the batch → the send and its token."""


class _Receivers:
    """What must be known of the receivers, read after their rows were locked."""

    def __init__(self, connection: Connection, queries: Queries, sends: Sends) -> None:
        ids = Texts({send.id for send, _ in sends.values()})
        self.last: dict[str, int] = dict(queries.run(connection, "lock_receivers", ids=ids).fetchall())
        self.waiting: dict[str, int] = {}
        self.by_token: dict[tuple[str, int], int] = {}
        self.by_key: dict[tuple[str, str], int] = {}
        asked = {
            "ids": Texts(send.id for send, _ in sends.values()),
            "tokens": Ints(token for _, token in sends.values()),
            "keys": Texts(send.message.key for send, _ in sends.values()),
        }
        for id, number, token, key in queries.run(connection, "known_of", **asked):
            if token is None:
                self.waiting[id] = number
                continue
            self.by_token[id, token] = number
            if key is not None:
                self.by_key[id, key] = number

    def seen(self, send: Send, token: int) -> int | None:
        """The number that this message got before: by this write, if its answer was lost, or by its key."""
        key = send.message.key
        found = self.by_token.get((send.id, token))
        return found if found is not None or key is None else self.by_key.get((send.id, key))

    def number(self, send: Send, token: int) -> int:
        """The next number, taken."""
        number = self.last[send.id] = self.last[send.id] + 1
        self.waiting[send.id] = self.waiting.get(send.id, 0) + 1
        self.by_token[send.id, token] = number
        if send.message.key is not None:
            self.by_key[send.id, send.message.key] = number
        return number


def send_alone(connection: Connection, queries: Queries, one: Send, token: int) -> Answer:
    """Append one message without a transaction around it: look, and write if nobody came between. None if somebody did,
    or if more must be done."""
    key = one.message.key
    found = queries.run(connection, "look_at_receiver", execution=one.id, token=token, key=key).fetchone()
    if found is None:
        return ExecutionNotFoundError(one.id)
    last, waiting, by_token, by_key = found
    if by_token is not None or by_key is not None:
        return int(by_key if by_token is None else by_token)
    if waiting >= one.limit:
        return SignalQueueFullError(one.id, one.limit)
    if last >= KEYS_REMEMBERED:
        return None
    values = rows.message_values(attrs.evolve(one.message, id=last + 1))
    message = dict(zip(_NAMES, (one.id, *values, rows.message_crc(one.id, values), token), strict=True))
    channel, teller = queries.news
    done = queries.run(
        connection, "receive_next", channel=channel, teller=teller, keep=TOKENS_REMEMBERED, **message
    ).fetchone()
    return None if done is None else int(last + 1)


def send(connection: Connection, queries: Queries, sends: Sends) -> dict[int, Answer]:
    """Append each message in order, inside the caller's transaction. Answers by place."""
    receivers = _Receivers(connection, queries, sends)
    answers: dict[int, Answer] = {}
    messages: list[tuple[Any, ...]] = []
    for place, (one, token) in sends.items():
        before = receivers.seen(one, token)
        if one.id not in receivers.last:
            answers[place] = ExecutionNotFoundError(one.id)
        elif before is not None:
            answers[place] = before
        elif receivers.waiting.get(one.id, 0) >= one.limit:
            answers[place] = SignalQueueFullError(one.id, one.limit)
        else:
            answers[place] = number = receivers.number(one, token)
            values = rows.message_values(attrs.evolve(one.message, id=number))
            messages.append((one.id, *values, rows.message_crc(one.id, values), token))
    if messages:
        _store(connection, queries, receivers, messages)
    return answers


def _store(connection: Connection, queries: Queries, receivers: _Receivers, messages: list[tuple[Any, ...]]) -> None:
    ids = list({row[0] for row in messages})
    last = Ints(receivers.last[id] for id in ids)
    parameters = columns(_NAMES, _KINDS, messages) | {"ids": Texts(ids), "last": last}
    channel, teller = queries.news
    queries.run(connection, "receive", channel=channel, teller=teller, keep=TOKENS_REMEMBERED, **parameters)
    # Only a receiver with this many numbers behind it can have as many keys.
    many = [id for id in ids if receivers.last[id] > KEYS_REMEMBERED]
    if many:
        keep = Ints(KEYS_REMEMBERED + receivers.waiting[id] for id in many)
        queries.run(connection, "forget_keys", ids=Texts(many), keep=keep)
