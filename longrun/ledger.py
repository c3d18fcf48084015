"""Progress inside a step: cursors, memos, branches and `local`, captured as bytes and handed over to be saved.

Place in the life of an execution: run a step. A `Ledger` belongs to one visit of a step and outlives its attempts: what
it holds when an attempt ends is what the next one is given. Nothing here knows of an event loop: async steps, step
threads and child processes use the same code.

A capture takes the cursors and `local` of one context at one moment: an item's end, a branch's end or a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from longrun import codec
from longrun.errors import DuplicateKeyError

SCALARS = frozenset({str, int, float, bool, type(None)})
FREE_SECONDS = 0.05
"""A `local` that is dear to encode is captured at every item's end for this long in all …"""
SHARE = 0.2
"""… and after that only while encoding it takes less than this share of the step's time."""


class Ledger:
    """What one visit of a step has got done: everything captured, and what of it is not handed over yet."""

    def __init__(self, entries: Mapping[str, bytes] | None = None) -> None:
        self.entries: dict[str, bytes] = dict(entries or {})
        self.lock = threading.RLock()
        self.stored = bool(self.entries)
        """Whether the store may hold entries of this visit, which its end must clear."""
        self._put: dict[str, bytes] = {}
        self._drop: set[str] = set()
        self._groups: dict[str, Group] = {}

    def group(self, prefix: str) -> Group:
        """The captures of one context: the step's own (prefix "") or a branch's."""
        group = Group(self, prefix)
        with self.lock:
            self._groups[prefix] = group
        return group

    def close(self, prefix: str) -> None:
        """A branch is over: forget its context and everything below it."""
        with self.lock:
            self._groups.pop(prefix, None)
            self.drop([key for key in self.entries if key.startswith(prefix)] if prefix else list(self.entries))

    def forget_groups(self) -> None:
        """An attempt is over: what its contexts had captured is merged in, the contexts are gone."""
        with self.lock:
            self._emit()
            self._groups.clear()

    def record(self, key: str, data: bytes) -> None:
        with self.lock:
            self.entries[key] = data
            self._put[key] = data
            self._drop.discard(key)

    def drop(self, keys: Iterable[str]) -> None:
        with self.lock:
            for key in keys:
                if self.entries.pop(key, None) is not None:
                    self._put.pop(key, None)
                    self._drop.add(key)

    @property
    def dirty(self) -> bool:
        return bool(self._put or self._drop) or any(group.dirty for group in self._groups.values())

    def collect(self) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """What is new since the last call, to be saved now: entries to put, and keys to drop."""
        with self.lock:
            self._emit()
            put, drop = self._put, tuple(self._drop)
            self._put, self._drop = {}, set()
            self.stored = self.stored or bool(put)
            return put, drop

    def _emit(self) -> None:
        for group in list(self._groups.values()):
            group.emit()


class Scope:
    """Where names must be unique: a context, or one item of a loop in it."""

    __slots__ = ("keys", "names", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: set[str] = set()
        self.keys: set[str] = set()


class Cursor:
    """How many items of a loop are done: `n` now, `captured` as of the last capture."""

    __slots__ = ("captured", "ended", "key", "n", "of", "shown")

    def __init__(self, key: str, stored: bytes | None) -> None:
        self.key = key
        saved: dict[str, Any] = codec.loads(stored) if stored else {}
        self.n: int = saved.get("n", 0)
        self.of: int | None = saved.get("of")
        self.ended: bool = saved.get("end", False)
        self.captured: tuple[int, bool] = (self.n, self.ended)
        self.shown: tuple[int, bool] | None = self.captured if stored else None

    def encode(self) -> bytes:
        n, ended = self.captured
        tree: dict[str, Any] = {"n": n, "of": self.of}
        if ended:
            tree["end"] = True
        return codec.dumps(tree)


class Group:
    """The cursors and the `local` of one context, and the scopes that are open in it."""

    def __init__(self, ledger: Ledger, prefix: str) -> None:
        self.ledger = ledger
        self.prefix = prefix
        self.dirty = False
        stored = ledger.entries.get(prefix + "local")
        self.local: dict[Any, Any] = codec.decode(stored, dict, path="local") if stored else {}
        self.stack = [Scope(prefix)]
        self._cursors: dict[str, Cursor] = {}
        self._shown_local = stored
        self._local: dict[Any, Any] | bytes | None = None
        self._dropping: set[str] = set()
        self._began = time.monotonic()
        self._spent = 0.0

    @property
    def scope(self) -> Scope:
        return self.stack[-1]

    def claim(self, kind: str, name: object) -> str:
        """The key of a name in the open scope, which may be used once there."""
        mark = f"{kind}:{_quote(name)}"
        scope = self.scope
        if mark in scope.names:
            raise DuplicateKeyError(str(name))
        scope.names.add(mark)
        key = scope.prefix + mark
        for open_scope in self.stack:
            open_scope.keys.add(key)
        return key

    def enter(self, name: str, n: int, depth: int, first: bool) -> Scope:
        """Open the scope of item `n` of a loop that stands at `depth`."""
        del self.stack[depth:]
        scope = Scope(f"{self.scope.prefix}{_quote(name)}#{n}/")
        if first and self.ledger.entries:
            scope.keys = {key for key in self.ledger.entries if key.startswith(scope.prefix)}
        self.stack.append(scope)
        return scope

    def leave(self, depth: int) -> None:
        """The item is done: its keys go with the capture that saves past it."""
        if len(self.stack) > depth:
            keys = self.stack[depth].keys
            del self.stack[depth:]
            if keys:
                self._dropping |= keys
                for scope in self.stack:
                    scope.keys -= keys

    def cursor(self, key: str) -> Cursor:
        cursor = Cursor(key, self.ledger.entries.get(key))
        with self.ledger.lock:
            self._cursors[key] = cursor
        return cursor

    def capture(self, *, force: bool = False) -> bool:
        """Note cursors and `local` as they are now, together; False if `local` is too dear to encode again so soon."""
        with self.ledger.lock:
            if not self._capture_local(force):
                return False
            for cursor in self._cursors.values():
                cursor.captured = (cursor.n, cursor.ended)
            if self._dropping:
                for key in self._dropping:
                    self._cursors.pop(key, None)
                self.ledger.drop(self._dropping)
                self._dropping = set()
            self.dirty = True
            return True

    def _capture_local(self, force: bool) -> bool:
        local = self.local
        if not local and self._shown_local is None and self._local is None:
            return True
        for value in local.values():
            if type(value) not in SCALARS:
                return self._encode_local(force)
        self._local = local.copy()  # scalars only: the copy cannot change, so it is encoded when it is saved
        return True

    def _encode_local(self, force: bool) -> bool:
        began = time.monotonic()
        if not force and self._spent > FREE_SECONDS and self._spent > SHARE * (began - self._began):
            return False
        self._local = codec.encode(self.local, dict, path="local")
        self._spent += time.monotonic() - began
        return True

    def emit(self) -> None:
        """Put what was captured since the last time into the ledger."""
        if not self.dirty:
            return
        self.dirty = False
        for cursor in self._cursors.values():
            if cursor.shown != cursor.captured:
                self.ledger.record(cursor.key, cursor.encode())
                cursor.shown = cursor.captured
        if self._local is not None:
            data = self._local if isinstance(self._local, bytes) else codec.encode(self._local, dict, path="local")
            if data != self._shown_local:
                self.ledger.record(self.prefix + "local", data)
                self._shown_local = data
            self._local = None


def _quote(name: object) -> str:
    return str(name).replace("%", "%25").replace("/", "%2F").replace("#", "%23")
