"""Waiting for others: a connection of its own that LISTENs, and a pipe that interrupts the wait.

Place in the life of an execution: claim, event. Whoever creates, sends, releases or finishes notifies the schema's
channel in the same transaction; an ordinary checkpoint does not.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from longrun.stores._postgres.driver import errors, psycopg
from longrun.stores._postgres.links import Connection, unavailable


class Listener:
    """For one watcher thread; only `wake` may be called from others."""

    def __init__(self, channel: str, teller: str, connect: Callable[[], Connection]) -> None:
        self._channel = channel
        self._teller = teller.encode()
        self._connect = connect
        self._connection: Connection | None = None
        self._listens = self._heard = False
        self._start()
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for end in self._pipe:
            os.close(end)

    def wake(self) -> None:
        try:
            os.write(self._pipe[1], b"!")
        except BlockingIOError:  # full: it is awake already
            return

    def wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        if self._connection is None:
            self._start()
            return True  # what was told while nobody listened is lost: better look
        try:
            if not self._listens:
                self._listen(self._connection)
            while True:
                if self._told(self._connection):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._interrupted(self._connection.fileno(), left):
                    return True
        except psycopg.Error as error:
            self._connection.close()
            self._connection = None
            raise unavailable(error) from error

    def _start(self) -> None:
        connection = self._connect()
        connection.add_notify_handler(self._hear)
        try:
            self._listen(connection)
        except psycopg.Error as error:
            connection.close()
            raise unavailable(error) from error
        self._connection = connection

    def _listen(self, connection: Connection) -> None:
        try:
            connection.execute(f'LISTEN "{self._channel}"'.encode())
        except errors.ReadOnlySqlTransaction:  # a standby tells nobody, until it is the primary
            self._listens = False
        else:
            self._listens = True

    def _told(self, connection: Connection) -> bool:
        """Whether anybody but this store itself had something to say. libpq is asked without the driver between: what
        this store says comes along with the answer to its write, for which the writer needs the interpreter."""
        connection.pgconn.consume_input()
        while (notify := connection.pgconn.notifies()) is not None:
            self._heard = self._heard or notify.extra != self._teller
        heard, self._heard = self._heard, False
        return heard

    def _hear(self, notify: psycopg.Notify) -> None:
        """What comes while the connection is told to listen."""
        self._heard = self._heard or notify.payload.encode() != self._teller

    def _interrupted(self, fd: int, seconds: float) -> bool:
        """Wait for the server or for `wake`; True if it was `wake`."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._pipe[0], select.POLLIN)
        ready = {found for found, _ in poll.poll(max(1, int(seconds * 1000)))}
        if self._pipe[0] not in ready:
            return False
        while True:
            try:
                os.read(self._pipe[0], 4096)
            except BlockingIOError:
                return True
