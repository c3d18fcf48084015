"""A kill storm: start the program, kill it, start it again, until enough kills have fired; then let it finish.

Some of the processes die at a random moment, the others before or after a random call of the store (or, for files, of
the operating system). Every random choice comes from one seed, which a failure names.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from attrs import define, field

from longrun.stores import open_store
from tests.campaign.forks import Forks
from tests.campaign.judge import Verdict, judge
from tests.campaign.outside import Record, read, read_on

PROGRAM = "tests.campaign.program"
LONGEST_LIFE = 0.2
"""Seconds after which a process that dies at a random moment has died."""
PATIENCE = 20.0
"""Seconds that a trap may take to fall, and that the last process may take to finish."""
LOOPS = ("asyncio", "trio")


@define
class Storm:
    """One store, one ledger, many short-lived processes."""

    url: str
    place: Path
    options: dict[str, Any] = field(factory=dict)
    kills: int = 0
    processes: int = 0
    _batch: int = 0
    _read: int = 0

    @property
    def ledger(self) -> Path:
        return self.place / "ledger"

    def rage(self, kills: int, seed: int) -> Verdict:
        """Kill so many processes, then let the last one finish."""
        dice = random.Random(seed)
        with Forks(PROGRAM) as forks:
            while self.kills < kills:
                self.kill_once(forks, self.plan(dice), dice.uniform(0.0, LONGEST_LIFE))
            self.finish(forks)
        return self.verdict()

    def plan(self, dice: random.Random) -> dict[str, Any] | None:
        """Where the next process dies; None for a random moment."""
        calls = ["commit", "commit", "claim", "any"] + (["disk"] * 3 if self.url.startswith("file:") else [])
        if dice.random() < 0.4:
            return None
        call = dice.choice(calls)
        most = {"claim": 3, "disk": 60}.get(call, 12) * (4 if dice.random() < 0.1 else 1)
        return {"call": call, "n": dice.randint(1, most), "when": dice.choice(["before", "after"])}

    def kill_once(self, forks: Forks, trap: dict[str, Any] | None, life: float) -> bool:
        """One process, to its death; whether the trap itself killed it."""
        self.spawn(forks, trap)
        end = forks.end(life if trap is None else PATIENCE)
        assert end is not None
        assert trap is None or not end.by_us, f"process {self.processes} stood still before {trap} was reached"
        assert end.killed, f"process {self.processes} with {trap} ended with {end.code}"
        self.kills += 1
        return not end.by_us

    def finish(self, forks: Forks) -> None:
        """One more process, which nobody kills: it must come to its end."""
        (self.place / "stop").touch()
        self.spawn(forks, None)
        end = forks.end(PATIENCE)
        assert end is not None
        assert end.code == 0, f"the last process ended with {end.code}; killed for its slowness: {end.by_us}"

    def spawn(self, forks: Forks, trap: dict[str, Any] | None) -> None:
        self.processes += 1
        forks.spawn(
            url=self.url,
            options=self.options,
            ledger=str(self.ledger),
            process=self.processes,
            batch=self.next_batch(),
            stop=str(self.place / "stop"),
            trap=trap,
            loop=LOOPS[self.processes % 2],
        )

    def next_batch(self) -> int:
        """The first batch that no process has told to be done."""
        records, self._read = read_on(self.ledger, self._read)
        self._batch = max([self._batch, *(record["number"] + 1 for record in records if record["kind"] == "batch")])
        return self._batch

    def records(self) -> list[Record]:
        """What is judged."""
        return read(self.ledger)

    def verdict(self) -> Verdict:
        backend = open_store(self.url, **self.options).backend
        backend.open()
        try:
            return judge(self.records(), backend)
        finally:
            backend.close()
