"""Waiting for what others do: a subscription on a connection of its own.

Place in the life of an execution: event. The commit script says once for each batch that something was created, sent,
released, parked or finished; a step that only goes on says nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from longrun.errors import LongrunError
from longrun.stores._redis.link import Link

LOOK = 0.05
"""Seconds after which a wait looks whether it was woken from this process."""
PATIENCE = 5.0
"""Seconds in which a server should have answered that it will pass on what is said."""
AT_ONCE = 1 << 16
"""Bytes that are taken in at once."""


class Watch:
    """Used by one thread; `wake` and `close` come from others."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._subscription: Any = None
        self._socket: Any = None
        """That of the subscription; None if the driver is to read from it."""
        self._no_news: tuple[bytes, ...] = ()
        """What this store says itself, as it is heard, and what is said by who only tries whether he may."""
        self._piece = b""
        """The beginning of something like that, of which the rest is on its way."""
        self._woken = threading.Event()

    def wait(self, timeout: float) -> bool:
        """True once something was said, or may have been missed; False after `timeout` seconds."""
        try:
            if self._subscription is None:
                self._link.once(self._subscribe)
                return True
            deadline = time.monotonic() + timeout
            while not self._woken.is_set():
                if self._link.once(self._heard):
                    return True
                if time.monotonic() >= deadline:
                    return False
            self._woken.clear()
        except LongrunError:
            self.close()
            raise
        return True

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _subscribe(self) -> None:
        subscription = self._link.client.pubsub()
        try:
            subscription.subscribe(self._link.channel)
            deadline = time.monotonic() + PATIENCE
            while subscription.get_message(timeout=LOOK) is None:  # a refusal is for the driver to read, however late
                if self._woken.is_set():
                    self._woken.clear()
                    subscription.close()
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError
            connection = subscription.connection
            is_checked = getattr(connection, "health_check_interval", 0)  # the answers are for the driver to read
            self._socket = None if is_checked else getattr(connection, "_sock", None)
            if self._socket is not None:
                self._socket.settimeout(LOOK)
        except BaseException:
            subscription.close()
            raise
        self._subscription, self._piece = subscription, b""
        channel, name = self._link.channel, self._link.name.encode()
        self._no_news = (*_as_passed_on(channel, name), *_as_passed_on(channel, b""))

    def _heard(self) -> bool:
        """Whether anybody else said anything; all that was said by now is taken in at once. What this store itself says
        comes along with the answer to its write: to take it apart as the driver does would hold the interpreter while
        the writer waits for it."""
        said = self._piece + self._received()
        for known in self._no_news:
            said = said.replace(known, b"")
        no_news = any(known.startswith(said) for known in self._no_news)
        self._piece = said if no_news else b""
        return not no_news

    def _received(self) -> bytes:
        if self._socket is None:
            message = self._subscription.get_message(timeout=LOOK)
            said = message is not None and message["type"] == "message"
            return _as_passed_on(self._link.channel, message["data"])[0] if said else b""
        try:
            received: bytes = self._socket.recv(AT_ONCE)
        except TimeoutError:
            return b""
        if not received:
            raise ConnectionResetError
        return received


def _as_passed_on(channel: bytes, said: bytes) -> tuple[bytes, bytes]:
    """What somebody said as the server passes it on, in either version of its protocol."""
    message = b"3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(channel), channel, len(said), said)
    return b"*" + message, b">" + message
