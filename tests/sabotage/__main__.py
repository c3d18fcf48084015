"""Plant every bug (or the named ones) and print the table: what was wrong, which test saw it, in how many seconds.

With `--check` they are only planted, each in a process of its own, to see that all have their place.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback

import longrun
from tests.sabotage import bugs
from tests.sabotage.run import GREEN, run_green, run_planted


def check() -> int:
    """How many bugs have lost their place. A fork for each costs next to nothing, if it need not import the library."""
    for module in pkgutil.walk_packages(longrun.__path__, "longrun."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    lost = 0
    for bug in bugs.BUGS.values():
        child = os.fork()
        if child == 0:
            try:
                bug.plant()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(f"{bug.name} has lost its place")
            lost += 1
    return lost


def main(names: list[str]) -> int:
    if names == ["--check"]:
        return check()
    chosen = [bugs.BUGS[name] for name in names or bugs.BUGS]
    green = run_green(test for bug in chosen for test in bug.tests)
    if green.code != GREEN:
        print(green.output)
        print("the tests fail without any bug: nothing can be shown")
        return 2
    print("| planted bug | what is wrong then | caught by | seconds |")
    print("|---|---|---|---:|")
    missed = 0
    for bug in chosen:
        outcome = run_planted(bug)
        missed += not outcome.caught
        by = f"`{(outcome.by or '').removeprefix('tests/')}`" if outcome.caught else f"**nobody** ({outcome.code})"
        print(f"| {bug.name} | {bug.says} | {by} | {outcome.seconds:.1f} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
