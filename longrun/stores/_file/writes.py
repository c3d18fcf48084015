"""A batch of writes: creations, saves and messages, each made durable before it is acknowledged.

Place in the life of an execution: start, checkpoint, finish. All of it runs in the store's writer thread; only the
waiting for the disk is spread over a pool of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from longrun.errors import ExecutionNotFoundError, LongrunError
from longrun.stored import Create, Save, Send
from longrun.stores._file import inbox
from longrun.stores._file.births import Birth, Post
from longrun.stores._file.catalog import Catalog
from longrun.stores._file.done import Finished
from longrun.stores._file.journal import failed, remove_locked
from longrun.stores._file.mine import Journals
from longrun.stores._file.place import Place, done_name, journal_name, stem_of
from longrun.stores._file.reading import locate
from longrun.stores._file.saves import Saves
from longrun.stores._file.syncing import SyncPool
from longrun.stores._file.tidying import Janitor
from longrun.stores.base import Answer

CREATE_CHUNK = 128

Answers = list[Answer]


class Writes:
    """What this process does to executions, its own and others'."""

    def __init__(self, place: Place, catalog: Catalog, finished: Finished) -> None:
        self.place, self.catalog, self.finished = place, catalog, finished
        self.pool = SyncPool(place.disk)
        self.journals = Journals(place, catalog, finished)
        self.janitor = Janitor(place, catalog, finished)
        self._saves = Saves(self.journals, self.pool, self.janitor)

    def close(self) -> None:
        self.janitor.tidy()
        self.journals.close()
        self.janitor.close()
        self.pool.close()

    def save(self, batch: Sequence[tuple[int, Save]], answers: Answers) -> None:
        self._saves.save(batch, answers)

    # creations

    def create(self, batch: Sequence[tuple[int, Create]], answers: Answers) -> None:
        fresh: dict[str, Birth] = {}
        for place, create in batch:
            id = create.definition.id
            stem = stem_of(id)
            if id in fresh or self._taken(id, stem):
                answers[place] = False
            else:
                fresh[id] = Birth(place, create, stem)
        births = list(fresh.values())
        self.journals.expect(len(births))
        size = min(CREATE_CHUNK, self.journals.limit)
        for start in range(0, len(births), size):
            self._create_chunk(births[start : start + size], answers)
        if births or any(answers[place] is False for place, _ in batch):  # also that an id is taken must stay true
            self.place.sync_names(self.place.live)

    def _taken(self, id: str, stem: str) -> bool:
        """Whether an execution has the id; clears away what a crash in the middle of its deletion left."""
        if self.place.live.stat(journal_name(stem, 0)) is None:
            return self.place.done.stat(done_name(stem)) is not None
        if locate(self.place, id) is not None:
            return True
        with self.place.locked():
            return locate(self.place, id) is not None or not remove_locked(self.place, stem, 0)

    def _create_chunk(self, births: list[Birth], answers: Answers) -> None:
        try:
            for birth in births:
                birth.write(self.place)
            written = [birth for birth in births if birth.error is None]
            for birth, error in zip(written, self.pool.sync([birth.fd for birth in written]), strict=True):
                if error is not None:
                    birth.fail(self.place, error)
            with self.place.locked(shared=True):
                for birth in births:
                    answers[birth.where] = birth.publish(self.place)
        except BaseException:
            for birth in births:
                birth.abandon(self.place)
            raise
        for birth in births:
            if birth.journal is not None and answers[birth.where] is True:
                self.journals.adopt(birth.journal, birth.entry)
            elif answers[birth.where] is True:
                self.catalog.put(birth.entry)
                self.journals.changed(journal_name(birth.entry.stem, 0))
        self.journals.shrink()

    # messages

    def send(self, batch: Sequence[tuple[int, Send]], answers: Answers) -> None:
        by_id: dict[str, list[tuple[int, Send]]] = {}
        for place, send in batch:
            by_id.setdefault(send.id, []).append((place, send))
        with self.place.locked(shared=True):
            posts = [post for id, sends in by_id.items() if (post := self._address(id, sends, answers)) is not None]
            self.pool.run(lambda post: post.deliver(self.place), posts)
            self.place.sync_names(*[post.box.folder for post in posts if post.new])
        for post in posts:
            for (where, _), answer in zip(post.sends, post.answers, strict=True):
                answers[where] = answer
            self.journals.posted(post.box.name)

    def _address(self, id: str, sends: list[tuple[int, Send]], answers: Answers) -> Post | None:
        try:
            spot = locate(self.place, id)
            if spot is None:
                raise ExecutionNotFoundError(id)
            born, mail = self.catalog.mail(id, spot)
            done = spot.folder is self.place.done
            box = inbox.box_of(self.place, spot.stem, id, born, done=done)
            status = box.folder.stat(box.name)
            if status is None:
                box = inbox.sure_box(self.place, box, spot.stem, done=done)
                status = box.folder.stat(box.name)
            return Post(box, sends, mail, status is None or status.st_size == 0)
        except LongrunError as error:
            for where, _ in sends:
                answers[where] = error
        except OSError as error:
            for where, _ in sends:
                answers[where] = failed(error)
        return None
