"""The table on a page: a new row takes the place of the old ones of its job and store, all other rows stay.

Place in the life of a measurement: after it, where its figures are kept for readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.orders import ALL_STORES
from benchmarks.results import HEAD, Row, cells

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
"""Between these a page holds the newest figures."""

Cells = tuple[str, ...]


def has_marks(page: str) -> bool:
    return 0 <= page.find(BEGIN) < page.find(END)


def put_into(page: str, rows: Sequence[Row], machine: Mapping[str, str], jobs: Sequence[str]) -> str:
    """The page with these rows in its table, which follows the order of the jobs; without rows, the page as it is."""
    if not rows:
        return page
    before, _, rest = page.partition(BEGIN)
    held, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{_merged(held, rows, machine, jobs)}\n\n{END}{after}"


def _merged(held: str, rows: Sequence[Row], machine: Mapping[str, str], jobs: Sequence[str]) -> str:
    measured = list(dict.fromkeys((row.job, row.store) for row in rows))
    kept = [line for line in _rows_in(held, jobs) if line[:2] not in measured]
    told = ", ".join(f"{name} {value}" for name, value in machine.items())
    texts = _circumstances(_texts_in(held), measured, told) if kept else [told]
    lines = sorted([*kept, *map(cells, rows)], key=lambda line: (jobs.index(line[0]), _place(line[1])))
    table = "\n".join([_line(HEAD), "|" + "---|" * len(HEAD), *map(_line, lines)])
    return "\n\n".join([*texts, table])


def _rows_in(held: str, jobs: Sequence[str]) -> list[Cells]:
    """The rows of jobs; the head is none, nor is a line that has strayed in from another table."""
    split = [line.strip().removeprefix("|").removesuffix("|").split("|") for line in held.splitlines()]
    found = [tuple(cell.strip() for cell in line) for line in split]
    return [line for line in found if len(line) == len(HEAD) and line[0] in jobs]


def _texts_in(held: str) -> list[str]:
    return [line.strip() for line in held.splitlines() if line.strip() and not line.startswith("|")]


def _circumstances(texts: Sequence[str], measured: Sequence[tuple[str, str]], told: str) -> list[str]:
    """What the rows were taken on: the new ones are named, and no longer named where they were before."""
    named = [f"{job} {store}".strip() for job, store in measured]
    found: list[str] = []
    for text in texts:
        names, colon, facts = text.partition(": ")
        rest = [name for name in names.split(", ") if name not in named]
        if rest:
            found.append(f"{', '.join(rest)}{colon}{facts}")
    return [*found, f"{', '.join(named)}: {told}"]


def _place(store: str) -> int:
    """Rows of no store come last."""
    return ALL_STORES.index(store) if store in ALL_STORES else len(ALL_STORES)


def _line(line: Cells) -> str:
    return "| " + " | ".join(line) + " |"
