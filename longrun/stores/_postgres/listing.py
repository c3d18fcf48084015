"""Listing: a query as conditions that an index can answer, and rows as a listing shows them.

Place in the life of an execution: none of its own; command line, dashboard and start-up look through this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longrun.errors import CorruptDataError
from longrun.records import ExecutionState
from longrun.stored import Query, Stored
from longrun.stores import rows
from longrun.stores._postgres.arrays import Texts
from longrun.stores._postgres.batch import labels_text

_DEFINITION_END = len(rows.DEFINITION_COLUMNS)


class Conditions:
    """The conditions of one query: SQL from here, values bound."""

    def __init__(self, query: Query, *, page: bool) -> None:
        self._found: list[str] = []
        self.parameters: dict[str, Any] = {"limit": query.limit} if page else {}
        self.needs_definitions = False
        self._heads(query)
        self._definitions(query)
        if page and query.after is not None:
            self._found.append("(h.created, h.id) < (%(after_created)s, %(after_id)s)")
            self.parameters |= {"after_created": float(query.after[0]), "after_id": query.after[1]}

    @property
    def text(self) -> str:
        return " AND ".join(self._found or ["true"])

    def _add(self, condition: str, name: str, value: Any) -> None:
        self._found.append(condition)
        self.parameters[name] = value

    def _heads(self, query: Query) -> None:
        if query.states is not None:
            self._add("h.state = ANY(%(states)s)", "states", Texts([state.value for state in query.states]))
        if query.workflows is not None:
            names = [rows.clean(name) for name in query.workflows]
            self._add("h.workflow = ANY(%(workflows)s)", "workflows", Texts(names))
        for name in ("queue", "owner", "parent_id"):
            value = rows.clean(getattr(query, name))
            if value is not None:
                self._add(f"h.{name} = %({name})s", name, value)
        if query.owned is not None:
            self._found.append("h.owner IS NOT NULL" if query.owned else "h.owner IS NULL")
        if query.created_after is not None:
            self._add("h.created >= %(created_after)s", "created_after", float(query.created_after))
        if query.created_before is not None:
            self._add("h.created < %(created_before)s", "created_before", float(query.created_before))
        if query.ended_before is not None:
            self._add("h.ended < %(ended_before)s", "ended_before", float(query.ended_before))

    def _definitions(self, query: Query) -> None:
        self.needs_definitions = bool(query.metadata) or query.text is not None
        for n, (key, value) in enumerate(query.metadata.items()):
            self._label(n, key, value)
        if query.text is not None:
            text = rows.clean(query.text.casefold()) or ""
            for special in "\\%_":
                text = text.replace(special, "\\" + special)
            self._add("d.search LIKE %(text)s", "text", f"%{text}%")

    def _label(self, n: int, key: str, value: Any) -> None:
        """Equal, type and all. The first condition is for the index: it finds what holds at least this value."""
        self._add(f"coalesce(d.labels -> %(key{n})s, 'null'::jsonb) = %(value{n})s::jsonb", f"key{n}", rows.clean(key))
        self.parameters[f"value{n}"] = labels_text(value)
        if value is not None:
            self._add(f"d.labels @> %(label{n})s::jsonb", f"label{n}", labels_text({key: value}))


def stored_from(row: Sequence[Any]) -> Stored:
    """A row as a listing shows it. One that is damaged is shown as far as it can be: loading it tells the rest."""
    definition, head = row[:_DEFINITION_END], row[_DEFINITION_END:]
    if head[0] not in set(ExecutionState):
        head = ("blocked", *head[1:])
    try:
        shown = rows.definition_from(definition)
    except (ValueError, CorruptDataError):
        shown = rows.definition_from((*definition[:6], "{}", *definition[7:]))
    return Stored(definition=shown, head=rows.head_from(head))
