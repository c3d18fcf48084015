"""Start: create an execution and run it here, or find the one that has its id already.

Place in the life of an execution: start. `running`, owner and state are durable in one record before anybody hears of
it.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from longrun import views
from longrun.control_room import ControlRoom
from longrun.errors import ConfigError, ExecutionExistsError, ExecutionNotFoundError, LongrunError
from longrun.events import EventType
from longrun.handle import ExecutionHandle
from longrun.moves import loaded_of
from longrun.records import ExecutionState, check_id
from longrun.registry import AD_HOC, Step, StepFunction, StepRegistry, Workflow
from longrun.stored import Create, Loaded

if TYPE_CHECKING:
    from longrun.runner import Runner

State = ExecutionState
TAKEN_BY_START = frozenset({State.INITIALIZED, State.RUNNING, State.RESUMING})
Steps = str | Workflow | Iterable[StepFunction | Step | str]


TRIES = 3
"""How often an id is created that is taken, and then gone."""


class Starting(ControlRoom, abc.ABC):
    """Creates executions, for whoever can run them."""

    registry: StepRegistry
    owner: str
    ad_hoc: set[str]
    starting: set[str]
    """Ids that are being created in this owner's name."""
    runners: dict[str, Runner]

    @abc.abstractmethod
    def run(self, loaded: Loaded) -> Runner: ...

    @abc.abstractmethod
    def check_signed_on(self) -> None: ...

    @abc.abstractmethod
    def not_sure(self) -> None:
        """The answer to a create never came: it may be stored in this owner's name."""

    @abc.abstractmethod
    def emit(self, kind: EventType, execution_id: str, *, data: dict[str, Any] | None = None) -> None: ...

    async def start_new(self, made: Create, workflow: Workflow) -> None:
        """Store a new execution and run it here; if its id is taken, take up what is stored there."""
        if not await self.create(made):
            await self.start_again(made, workflow)

    async def start_again(self, made: Create, workflow: Workflow) -> None:
        """The same for one that could not be created."""
        loaded = await self.find_or_create(made, workflow)
        if loaded is None:
            return
        if made.id not in self.runners and loaded.head.state in TAKEN_BY_START:
            await self.take_over(loaded, frozenset(TAKEN_BY_START))

    async def find_or_create(self, made: Create, workflow: Workflow) -> Loaded | None:
        """What has the id of one that could not be created for it; None if it could be now. One that is deleted in this
        very moment gives way."""
        for _ in range(TRIES):
            with contextlib.suppress(ExecutionNotFoundError):
                return await self.existing(made.id, workflow)
            if await self.create(made):
                return None
        return await self.existing(made.id, workflow)

    async def create(self, made: Create, origin: dict[str, Any] | None = None) -> bool:
        """Store a new execution and, if it is ours, run it; False if its id is taken. `origin` is told with its
        start."""
        ours = made.head.owner is not None
        twice = made.id in self.starting
        if ours and not twice:
            self.starting.add(made.id)
        try:
            created = await self.store_new(made)
        except BaseException:
            if ours:
                self.not_sure()
            raise
        finally:
            if ours and not twice:
                self.starting.discard(made.id)
        if created and ours:
            self.emit(EventType.EXECUTION_STARTED, made.id, data=origin)
            self.run(loaded_of(made))
        return created

    async def existing(self, id: str, workflow: Workflow) -> Loaded:
        """The execution that has the id already: the same workflow is fine."""
        loaded = await self.store.load(id)
        if loaded.definition.workflow != workflow.name:
            raise ExecutionExistsError(id, loaded.definition.workflow, workflow.name)
        return loaded

    def resolved(self, workflow: Steps) -> Workflow:
        """A workflow of the registry, or one made of the steps that were given."""
        self.check_signed_on()
        found = self.registry.resolve(workflow)
        if found.name.startswith(AD_HOC):
            self.ad_hoc.add(found.name)
        return found

    async def start_child(self, parent: Runner, workflow: Any, state: Any, key: str) -> ExecutionHandle:
        """Start an execution once for a visit of its parent and a key, in the parent's queue: whoever takes the parent
        up after a crash serves that."""
        id = child_id(parent.id, parent.head.visit, key)
        found, family = self.resolved(workflow), parent.book.definition
        made = self.new(
            found, state, self.begun(), id=id, queue=family.queue, priority=family.priority, parent_id=parent.id
        )
        await self.patiently(partial(self.start_new, made, found), known=True)
        return ExecutionHandle(self, made.id, away=partial(parent.seat.away, parent))


def child_id(parent: str, visit: int, key: object) -> str:
    """The id of a child: parent, visit and key, shortened with a digest where that is too long or has other letters."""
    if not isinstance(key, str) or not key:
        raise ConfigError("key", key, "give the child a key, unique among the children of this visit")
    wanted = f"{parent}~{visit}~{key}"
    try:
        return check_id(wanted)
    except LongrunError:
        return views.digest_id(parent, wanted)
