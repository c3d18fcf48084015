"""What can wait: old generations are removed, and journals of finished executions move away, in a thread of its own.

Place in the life of an execution: after a claim, and after its end. What fails stays where it is, for another time.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

from longrun.errors import LongrunError
from longrun.stores._file.catalog import Catalog
from longrun.stores._file.done import Finished
from longrun.stores._file.journal import Journal, Over, remove_older
from longrun.stores._file.moving import move_away
from longrun.stores._file.place import Place

TIDY_FINISHED = 64
TIDY_OVER = 4096
"""Most that were claimed end soon, and take their old generations with them: before a lease is renewed, nobody is in a
hurry to remove these on their own."""
MOVE_CHUNK = 512


class Janitor:
    """Tidies up behind the writer's thread, and in it when the store closes."""

    def __init__(self, place: Place, catalog: Catalog, finished: Finished) -> None:
        self._place, self._catalog, self._finished = place, catalog, finished
        self._over: dict[str, Over] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longrun-file-tidy")
        self._tidying: Future[None] | None = None

    def close(self) -> None:
        self._thread.shutdown()

    def supersedes(self, journal: Journal) -> None:
        """The generations before this one are of no use any more."""
        self._over[journal.id] = Over(journal.id, journal.gen, journal.ino)

    def tidy_soon(self, *, now: bool = False) -> None:
        """Start, when enough has come together; `now`, if there is anything."""
        old, ended = len(self._over), len(self._catalog.finished)
        anything = old or ended or not self._finished.is_proven
        if old < TIDY_OVER and ended < TIDY_FINISHED and not (now and anything):
            return
        if self._tidying is None or self._tidying.done():
            over, self._over = self._over, {}
            self._tidying = self._thread.submit(self._tidy, over, prove=now)

    def tidy(self) -> None:
        """Do all of it now."""
        if self._tidying is not None:
            self._tidying.result()
        over, self._over = self._over, {}
        self._tidy(over)

    def _tidy(self, over: dict[str, Over], *, prove: bool = False) -> None:
        place, catalog = self._place, self._catalog
        with contextlib.suppress(OSError, LongrunError):
            with catalog.lock:
                ended = list(catalog.finished.values())
            for entry in ended:
                over.pop(entry.id, None)  # they go when it moves
            if over:
                with place.locked(shared=True):
                    remove_older(place, over.values())
            for start in range(0, len(ended), MOVE_CHUNK):
                for entry in move_away(place, self._finished, ended[start : start + MOVE_CHUNK]):
                    catalog.moved(entry)
            if prove:
                self._finished.prove()
