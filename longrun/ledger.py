"""Progress inside a step: cursors, memos, branches and `local`, captured as bytes and handed over to be saved.

Place in the life of an execution: run a step. A `Ledger` belongs to one visit of a step and outlives its attempts: what
it holds when an attempt ends is what the next one is given. Nothing here knows of an event loop: async steps, step
threads and child processes use the same code.

A capture takes the cursors and `local` of one context at one moment: an item's end, a branch's end or a checkpoint.
What a context does after its attempt or its branch has ended changes nothing here any more.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from longrun import codec
from longrun.errors import CodecError, DuplicateKeyError

SCALARS = frozenset({str, int, float, bool, type(None)})
SMALL = 32
"""A `local` of at most so many scalars is copied at every item's end without looking at the time."""
CHEAP = 0.001
"""A `local` that takes no longer than this to encode is captured at every item's end, however many there are."""
FREE_SECONDS = 1.0
"""A dearer one is captured at every item's end for this long in all …"""
SHARE = 0.2
"""… and after that only while encoding it takes less than this share of the step's time."""


_NONE: Mapping[Group, list[Scope]] = MappingProxyType({})
opened: ContextVar[Mapping[Group, list[Scope]]] = ContextVar("longrun_open_items", default=_NONE)
"""The scopes that are open in each context, where one of them is an item's, for the task or the thread that asks. Tasks
of one step do not stand in each other's items; one that is started inside an item does stand in that."""


LONG_NAME = 400
"""Letters. Of a longer name only the beginning is kept, with a digest of all of it."""
SHOWN_OF_NAME = 100


class Ledger:
    """What one visit of a step has got done: everything captured, and what of it is not handed over yet."""

    def __init__(self, entries: Mapping[str, bytes] | None = None) -> None:
        self.entries: dict[str, bytes] = dict(entries or {})
        self.lock = threading.RLock()
        self.stored = bool(self.entries)
        """Whether the store may hold entries of this visit, which its end must clear."""
        self.used = self.stored
        """Whether anything was ever noted here: most steps note nothing, and their ledger serves the next one."""
        self._put: dict[str, bytes] = {}
        self._drop: set[str] = set()
        self._groups: dict[str, Group] = {}
        self.awaited: set[str] = set()
        """Memos and maps of which nobody has seen yet that they are durable."""
        self.inherits: list[str] = []
        """Keys inside items and branches that earlier attempts have left, or a map that was cut short, in order."""

    def group(self, prefix: str) -> Group:
        """The captures of one context: the step's own (prefix "", with which an attempt begins) or a branch's."""
        with self.lock:
            self.used = True
            if not prefix:
                self.inherits = sorted(key for key in self.entries if "/" in key)
            group = self._groups[prefix] = Group(self, prefix)
            return group

    def inherited(self, prefix: str) -> list[str]:
        """What of that stands under the prefix of an item or a branch."""
        keys = self.inherits
        first = end = bisect_left(keys, prefix)
        while end < len(keys) and keys[end].startswith(prefix):
            end += 1
        return keys[first:end]

    def leave(self, prefix: str) -> set[str]:
        """A branch did not come to its end: what it had captured is kept for the next time it runs. Its keys."""
        with self.lock:
            group = self._groups.pop(prefix, None)
            if group is None:
                return set()
            group.emit()
            group.closed = True
            left = group.root.keys | {prefix + "local"}
            for key in left & self.entries.keys():
                at = bisect_left(self.inherits, key)
                if self.inherits[at : at + 1] != [key]:
                    self.inherits.insert(at, key)
            return left

    def finish(self, prefix: str, key: str, data: bytes) -> None:
        """A branch is over: its result stands in the place of everything below it."""
        with self.lock:
            group = self._groups.pop(prefix, None)
            if group is not None:
                group.closed = True
                self.drop(group.root.keys)
                self.drop([prefix + "local"])
            self.drop(self.inherited(prefix))
            self.record(key, data)

    def forget_groups(self) -> None:
        """An attempt is over: what its contexts had captured is merged in, the contexts are gone."""
        with self.lock:
            self._emit()
            for group in self._groups.values():
                group.closed = True
            self._groups.clear()
        opened.set(_NONE)

    def record(self, key: str, data: bytes) -> None:
        with self.lock:
            self.used = True
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
        with self.lock:
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
        for group in self._groups.values():
            group.emit()


class Cursor:
    """How many items of a loop are done: `n` now, `captured` as of the last capture."""

    __slots__ = ("captured", "captured_end", "ended", "key", "n", "of", "shown")

    def __init__(self, key: str, stored: bytes | None) -> None:
        self.key = key
        saved: dict[str, Any] = codec.loads(stored) if stored else {}
        self.n: int = saved.get("n", 0)
        self.of: int | None = saved.get("of")
        self.ended: bool = saved.get("end", False)
        self.captured, self.captured_end = self.n, self.ended
        self.shown = stored

    def encode(self) -> bytes:
        tree: dict[str, Any] = {"n": self.captured, "of": self.of}
        if self.captured_end:
            tree["end"] = True
        return codec.dumps(tree)


class Scope:
    """Where names must be unique: a context, or the item of a loop that is open in it."""

    __slots__ = ("_base", "_cursor", "keys", "names")

    def __init__(self, base: str, cursor: Cursor | None = None) -> None:
        self._base, self._cursor = base, cursor
        self.names: set[str] = set()
        self.keys: set[str] = set()
        """Everything opened in it, also further in."""

    @property
    def prefix(self) -> str:
        return self._base if self._cursor is None else f"{self._base}#{self._cursor.n}/"


class Group:
    """The cursors and the `local` of one context, and the scopes that are open in it."""

    def __init__(self, ledger: Ledger, prefix: str) -> None:
        self.ledger = ledger
        self.prefix = prefix
        self.dirty = False
        self.closed = False
        stored = ledger.entries.get(prefix + "local")
        self.local: dict[Any, Any] = codec.decode(stored, dict, path="local") if stored else {}
        self.root = Scope(prefix)
        self._alone = [self.root]
        self.look_at = 0.0
        """When (monotonic) a loop of this context should look up from its items."""
        self._captured: dict[str, Cursor] = {}
        """Cursors captured since they were last put into the ledger."""
        self._behind: dict[str, Cursor] = {}
        """Cursors that have moved since the last capture, where one was left out."""
        self._has_local = stored is not None
        self._shown_local = stored
        self._local: dict[Any, Any] | bytes | None = None
        self._failure: CodecError | None = None
        self._dropping: set[str] = set()
        self._began = time.monotonic()
        self._spent = 0.0
        self._price = 0.0

    # scopes

    @property
    def stack(self) -> list[Scope]:
        """The scopes that are open for who asks, from the context's own to that of the innermost item."""
        return opened.get().get(self, self._alone)

    @contextmanager
    def within(self, frames: list[Scope]) -> Iterator[None]:
        """Do something for whom these are open: a thread has the loop do it."""
        before = opened.set({**opened.get(), self: frames})
        try:
            yield
        finally:
            opened.reset(before)

    # names

    def claim(self, kind: str, name: object) -> str:
        """The key of a name in the open scope, which may be used once there."""
        mark = f"{kind}:{_quote(name)}"
        scope = self.stack[-1]
        if mark in scope.names:
            raise DuplicateKeyError(str(name))
        scope.names.add(mark)
        key = scope.prefix + mark
        self.own(key)
        return key

    def disclaim(self, scope: Scope, kind: str, name: object) -> None:
        """A call has returned nothing: its name may be used again."""
        scope.names.discard(f"{kind}:{_quote(name)}")

    def own(self, key: str) -> None:
        """Let a key go with the items that are open now."""
        for scope in self.stack:
            scope.keys.add(key)

    def record(self, key: str, data: bytes) -> None:
        """Keep a memo, unless this context is closed."""
        with self.ledger.lock:
            if not self.closed:
                self.ledger.record(key, data)

    # items

    def item_scope(self, name: str, cursor: Cursor) -> Scope:
        """The scope of the items of a loop that is opened in the scope open now."""
        return Scope(self.stack[-1].prefix + _quote(name), cursor)

    def item_opened(self, frames: list[Scope]) -> object:
        """An item begins: names belong to the last of `frames` now, and so does what an earlier attempt left of it.
        What `opened` holds then, for as long as nothing else is opened or closed."""
        now = {**opened.get(), self: frames}
        opened.set(now)
        for key in self.ledger.inherited(frames[-1].prefix) if self.ledger.inherits else ():
            self.own(key)
        return now

    def item_ended(self, cursor: Cursor, scope: Scope) -> None:
        """An item is done: captured with `local`; what was opened in it goes when that is saved."""
        if scope.names or scope.keys:
            self._leave(scope)
        cursor.n += 1
        self.capture(cursor)

    def loop_ended(self, cursor: Cursor, scope: Scope) -> None:
        self.close_scope(scope)
        cursor.ended = True
        self.capture(cursor)

    def close_scope(self, scope: Scope) -> None:
        """Leave a loop: names belong to the scope around it again."""
        stack = self.stack
        if scope in stack:
            opened.set({**opened.get(), self: stack[: stack.index(scope)]})

    def _leave(self, scope: Scope) -> None:
        scope.names.clear()
        keys, scope.keys = scope.keys, set()
        self._dropping |= keys
        for other in self.stack:
            other.keys -= keys

    # captures

    def capture(self, moved: Cursor | None = None, *, force: bool = False) -> bool:
        """Note cursors and `local` as they are now, together; False if `local` is too dear to encode again so soon.

        Runs at the end of every item, hence no call more than needed."""
        with self.ledger.lock:
            if self.closed:
                return False
            if (self.local or self._has_local) and not self._take_local(force):
                if moved is not None:
                    self._behind[moved.key] = moved
                return False
            if moved is not None:
                self._take_cursor(moved)
            if self._behind or self._dropping:
                self._catch_up()
            self.dirty = True
            return True

    def _take_cursor(self, cursor: Cursor) -> None:
        cursor.captured, cursor.captured_end = cursor.n, cursor.ended
        self._captured[cursor.key] = cursor

    def _catch_up(self) -> None:
        for cursor in self._behind.values():
            self._take_cursor(cursor)
        self._behind.clear()
        for key in self._dropping:
            self._captured.pop(key, None)
        self.ledger.drop(self._dropping)
        self._dropping = set()

    def _take_local(self, force: bool) -> bool:
        if self._failure is not None:
            raise self._failure
        self._has_local = True
        local = self.local
        if len(local) <= SMALL:
            for key, value in local.items():
                if type(value) not in SCALARS or type(key) is not str:
                    break
            else:
                self._local = local.copy()  # it can neither change nor be refused, so it is encoded when it is saved
                return True
        return self._encode_local(force)

    def _encode_local(self, force: bool) -> bool:
        began = time.monotonic()
        if (
            not force
            and self._price > CHEAP
            and self._spent > FREE_SECONDS
            and self._spent > SHARE * (began - self._began)
        ):
            return False
        self._local = codec.encode(self.local, dict, path="local")
        self._price = time.monotonic() - began
        self._spent += self._price
        return True

    def emit(self) -> None:
        """Put what was captured since the last time into the ledger: all of it, or, if it cannot be stored, nothing."""
        if not self.dirty:
            return
        self.dirty = False
        try:
            data = codec.encode(self._local, dict, path="local") if isinstance(self._local, dict) else self._local
        except CodecError as error:
            self._failure = error
            return
        self._local = None
        if data is not None and data != self._shown_local:
            self.ledger.record(self.prefix + "local", data)
            self._shown_local = data
        for cursor in self._captured.values():
            shown = cursor.encode()
            if shown != cursor.shown:
                self.ledger.record(cursor.key, shown)
                cursor.shown = shown
        self._captured.clear()


def _quote(name: object) -> str:
    text = str(name).replace("%", "%25").replace("/", "%2F").replace("#", "%23").replace("\0", "%00")
    if len(text) > LONG_NAME:  # an index has room for so much; and several names stand in the key of a nested item
        text = f"{text[:SHOWN_OF_NAME]}%~{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    if text.isascii():
        return text
    # half characters, as in the name of a file that is not UTF-8, which no store can write
    return "".join([f"%u{ord(letter):X}" if "\ud800" <= letter <= "\udfff" else letter for letter in text])
