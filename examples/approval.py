"""An approval that may take days: the execution waits for a signal and holds neither a task nor memory.

    python examples/approval.py [DIRECTORY]

The first executor starts the request and leaves while it waits. A second one, as after a restart, hands in the signed
decision; `key` makes a decision that is sent twice count once.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import Any

import anyio

from longrun import Executor, ExecutorConfig, Finish, StepContext, StepRegistry, WaitFor

registry = StepRegistry()


@registry.step
async def ask(state: dict[str, Any]) -> WaitFor:
    print(f"asking for approval of {state['amount']} EUR")
    return WaitFor("decision", state, timeout=timedelta(days=3))


@registry.step
async def decide(ctx: StepContext, state: dict[str, Any]) -> dict[str, Any] | Finish:
    if ctx.timed_out:
        return Finish({**state, "outcome": "nobody answered in time"})
    return {**state, "outcome": "approved" if ctx.signal["approved"] else "refused", "by": ctx.signal["by"]}


registry.workflow("approval", [ask, decide])


async def main(directory: str = ".longrun") -> None:
    config = ExecutorConfig(checkpoint_dir=directory)
    async with Executor(registry, config=config) as executor:
        run = await executor.start("approval", {"amount": 900}, id="request-7")
        print("now", (await run.wait("waiting", "completed")).state)

    async with Executor(registry, config=config) as executor:
        run = await executor.start("approval", id="request-7")
        if not (await run.info()).state.finished:
            await run.signal("decision", {"approved": True, "by": "chief"}, key="decision-of-request-7")
        print(await run.result())


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:2]))
