"""An agent loop: the same step again and again, with its paid calls remembered.

    python examples/agent.py [DIRECTORY]

`Repeat` makes every turn a checkpoint. Inside a turn, `ctx.once` keeps the answer of each model call: if the program
dies between two calls of a turn, the first is not paid for again. The "model" here counts its calls.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import anyio
from attrs import evolve, field, frozen

from longrun import Executor, ExecutorConfig, Finish, Repeat, StepContext, StepRegistry

registry = StepRegistry()


@frozen
class Conversation:
    """The agent's state: typed, and it comes back from a crash as it went."""

    goal: str
    bill: str
    messages: list[str] = field(factory=list)


async def ask_model(bill: str, prompt: str) -> str:
    """A paid call: each one adds a line to the bill."""
    async with await anyio.open_file(bill, "a") as file:
        await file.write(prompt + "\n")
    return f"answer to {prompt!r}"


@registry.step
async def turn(ctx: StepContext, state: Conversation) -> Conversation | Repeat | Finish:
    plan = await ctx.once("plan", ask_model, state.bill, f"plan turn {ctx.iteration}")
    tool = await ctx.once("tool", ask_model, state.bill, f"use a tool in turn {ctx.iteration}")
    state = evolve(state, messages=[*state.messages, plan, tool])
    if ctx.iteration == 4:
        return Finish(state)
    return Repeat(state)


registry.workflow("agent", [turn])


async def main(directory: str = ".longrun") -> None:
    async with Executor(registry, config=ExecutorConfig(checkpoint_dir=directory)) as executor:
        bill = Path(directory) / "bill.txt"
        run = await executor.start("agent", Conversation(goal="answer", bill=str(bill)), id="agent-1")
        result: Conversation = await run.result()
        print(f"{len(result.messages)} messages for {len(bill.read_text().splitlines())} paid calls")


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:2]))
