"""What a listing of tasks tells without reading their states, and the rules by which executions are found and claimed.

Place in the life of an execution: claim. Pure: no I/O. `stores/memory.py` is the readable form of the rules.
"""

from __future__ import annotations

from attrs import frozen

from longrun.errors import CodecError
from longrun.stored import Definition, Head, Stored
from longrun.stores._task import lines
from longrun.stores._task.document import decode
from longrun.stores._task.records import TaskRecord


@frozen
class Peek:
    """An execution as the first lines of its document show it."""

    record: TaskRecord
    definition: Definition
    """Without its steps."""
    head: Head
    waiting: int
    """Messages that wait."""
    last_message: int

    @property
    def stored(self) -> Stored:
        return Stored(definition=self.definition, head=self.head)

    @property
    def position(self) -> tuple[float, str]:
        return self.definition.created, self.definition.id

    @property
    def rank(self) -> tuple[int, float, str]:
        """The order in which executions are claimed."""
        return -self.definition.priority, self.definition.created, self.definition.id

    @property
    def sign(self) -> tuple[object, ...]:
        """Changes when another user of the store did something that others may wait for."""
        head = self.head
        return self.definition.id, head.state, head.owner, head.woken, head.due, self.last_message


def is_execution(record: TaskRecord) -> bool:
    """Other tasks of the application may stand in the same table, and records of longrun that are no executions."""
    return not record.id.startswith("~") and (
        record.metadata.get("longrun") == "execution"
        or ("longrun" not in record.metadata and lines.is_ours(record.data))
    )


def peek(record: TaskRecord) -> Peek | None:
    """None if nothing can be read: `load` says why."""
    if not is_execution(record):
        return None
    id = record.id
    head = record.data.split(b"\n", 4)[:4]
    try:
        if len(head) == 4 and lines.check_format(id, head[0]):
            parts = [lines.read_line(id, text) for text in head[1:]]
            values = {part[0]: part[1] for part in parts if part is not None}
            if values.keys() == {"definition", "head", "mail"}:
                mail = values["mail"]
                definition = lines.definition_in(id, values["definition"])
                return Peek(record, definition, lines.head_in(values["head"]), mail["waiting"], mail["last"])
        whole = decode(id, record.data, record.metadata)
    except CodecError:
        return None
    definition = lines.definition_in(id, lines.definition_out(whole.definition))
    return Peek(record, definition, whole.head, len(whole.messages), whole.last_message)
