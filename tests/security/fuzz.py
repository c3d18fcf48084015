"""A program that feeds every decoder of stored bytes with hostile ones, under an audit hook that stays for its life.

It prints how many were read and refused. Anything but an error of the library, and any event of the hook while a
decoder runs (an import, a file, a process, a compiled code), ends it with a traceback.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from longrun import codec
from longrun.errors import LongrunError
from longrun.life import Life
from longrun.seal import Seal
from longrun.snapshot import decode_state
from longrun.stored import Owner
from longrun.stores import assemble, rows
from longrun.stores._file import lines
from longrun.stores._redis import wire
from longrun.stores._task import lines as task_lines
from longrun.testing.samples import boundary, definition, head, signal

QUIET = ("object.__getattr__", "sys._getframe", "array.__new__", "ctypes.", "os.urandom", "gc.")
"""What the interpreter tells of that neither reaches out nor runs anything."""
Decoder = Callable[[bytes], Any]

seal = Seal(key=lambda key_id: ("k", bytes(32)))
plain = Seal()


def _fields(data: bytes) -> Any:
    return json.loads(data.decode())


def _row(data: bytes) -> Any:
    """One column of a head's row is hostile; the store decides by its checksum, and then by what can be true."""
    values = list(rows.head_values(head()))
    values[len(data) % len(values)] = data
    return assemble.fits(lambda: rows.head_crc("a", values), 1)


DECODERS: dict[str, tuple[Decoder, bytes]] = {
    "codec": (codec.decode, codec.encode({"a": [1, {"b": "c"}]})),
    "state": (lambda data: decode_state(data, {"1.0": b"[1]"}, True, Any), b'{"keep":{"a":null},"blobs":{"a":"1.0"}}'),
    "seal": (lambda data: plain.unwrap(data, "a/1"), plain.wrap(b"x" * 5000, "a/1")),
    "sealed": (lambda data: seal.unwrap(data, "a/1"), seal.wrap(b"secret", "a/1")),
    "line": (lines.unpack_any, lines.pack(lines.Identity("a", 0), 1, {"kind": "x", "n": 1}, [b"[1]"])[:-1]),
    "life": (lambda data: Life.from_dict(_fields(data)), b'{"owner":"a","host":"h","pid":1,"boot":"b","path":"/p"}'),
    "definition": (lambda d: wire.definition_from("a", d), wire.definition_bytes(definition("a"))),
    "control": (lambda d: wire.control_from("a", d), wire.control_bytes(b"a", head())),
    "row": (lambda d: wire.row_from("a", 1, d), wire.row_bytes(b"a", boundary(1))),
    "message": (lambda d: wire.message_from("a", b"1", d), wire.message_bytes("a", signal())),
    "owner": (lambda d: wire.owner_from(b"=a", d, 1.0), wire.owner_bytes(Owner(id="a", life={}, remaining=1.0))),
    "head": (_row, b"1"),
    "document": (
        lambda d: task_lines.read_document("a", d),
        task_lines.document("a", [task_lines.line("a", "head", {"x": 1})]),
    ),
}
ALLOWED = (
    *(LongrunError, lines.BrokenLineError, lines.ForeignLineError, wire.DamagedError),
    *(json.JSONDecodeError, UnicodeDecodeError),
)
UNFINISHED = {"life", "message"}
"""What was written is not yet what is stored: the server adds to it."""

armed = False
events: list[str] = []
counts: Counter[str] = Counter()


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if armed and not event.startswith(QUIET):
        events.append(event)


def look(name: str, data: bytes) -> None:
    global armed  # noqa: PLW0603 -- the hook is the interpreter's, and there is no way to take it back
    decoder, _ = DECODERS[name]
    armed = True
    try:
        decoder(data)
        counts["read"] += 1
    except ALLOWED:
        counts["refused"] += 1
    finally:
        armed = False
    assert not events, f"{name} of {data!r}: {events}"


@st.composite
def hostile(draw: st.DrawFn, good: bytes) -> bytes:
    """Noise, or what a decoder knows with some of its bytes changed, cut or repeated."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=80))
    data = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        data[place : place + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


def attack(name: str, examples: int, number: int) -> None:
    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(hostile(DECODERS[name][1]))
    def feed(data: bytes) -> None:
        look(name, data)

    feed()


def main(examples: int, number: int) -> None:
    for name, (decoder, good) in DECODERS.items():  # once without the hook, so that what is lazy has been imported
        try:
            decoder(good)
        except ALLOWED as error:
            if name not in UNFINISHED:
                raise AssertionError(f"{name} does not read what was written") from error
    sys.addaudithook(hook)
    for name in DECODERS:
        attack(name, examples, number)
    _hook_is_awake()
    print(counts["read"], counts["refused"])


def _hook_is_awake() -> None:
    global armed  # noqa: PLW0603 -- see above
    armed = True
    open("/dev/null").close()
    armed = False
    assert events == ["open"], events


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
