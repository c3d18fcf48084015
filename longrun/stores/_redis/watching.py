"""Waiting for what others do: a subscription on a connection of its own.

Place in the life of an execution: event. The commit script says once for each batch that something was created, sent,
released, parked or finished; a step that only goes on says nothing.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from longrun.errors import LongrunError
from longrun.stores._redis.link import Link

LOOK = 0.05
"""Seconds after which a wait looks whether it was woken from this process."""


class Watch:
    """Used by one thread; `wake` and `close` come from others."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._subscription: Any = None
        self._woken = threading.Event()

    def wait(self, timeout: float) -> bool:
        """True once something was said, or may have been missed; False after `timeout` seconds."""
        try:
            if self._subscription is None:
                self._link.once(self._subscribe)
                return True
            deadline = time.monotonic() + timeout
            while not self._woken.is_set():
                left = deadline - time.monotonic()
                if self._link.once(partial(self._heard, min(LOOK, max(0.0, left)))):
                    return True
                if left <= 0:
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
            subscription.get_message(timeout=LOOK)
        except BaseException:
            subscription.close()
            raise
        self._subscription = subscription

    def _heard(self, timeout: float) -> bool:
        """Whether anybody else said anything; all that was said by now is taken in at once."""
        heard, own = False, (b"", self._link.name.encode())
        while (message := self._subscription.get_message(timeout=0.0 if heard else timeout)) is not None:
            heard = heard or (message["type"] == "message" and message["data"] not in own)
            if not heard:
                return False
        return heard
