"""The command group. Importing it costs click and nothing else: `longrun --help` must be quick."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from longrun import __version__

COMMANDS = {
    "demo": ("demo", "Run a workflow, kill it with SIGKILL in the middle of a step, and watch it go on."),
    "run": ("run", "Run a workflow here, with live bars; with the id of an earlier run, resume it."),
    "list": ("listing", "List executions, newest first."),
    "show": ("show", "Show one execution: its steps, errors, history and progress."),
    "watch": ("watch", "Watch what runs, live."),
    "pause": ("control", "Pause executions, until somebody resumes them."),
    "resume": ("control", "Let paused or blocked executions go on."),
    "cancel": ("control", "End executions, for good."),
    "retry": ("control", "Run failed executions again, at the step that failed."),
    "signal": ("messages", "Send a signal to an execution."),
    "fork": ("messages", "Start a new execution from an old checkpoint."),
    "delete": ("control", "Remove finished executions."),
    "events": ("events", "What happened to an execution, and what happens now."),
    "workers": ("workers", "The processes that run executions, and whether they live."),
    "worker": ("worker", "Run what was submitted to the store, until SIGTERM."),
    "queues": ("queues", "What waits and runs in each queue; limits for all workers."),
    "dashboard": ("dashboard", "Open the dashboard in a browser."),
    "plan": ("planning", "What a resume would do, without doing it; exit code 1 if anything would be blocked."),
    "doctor": ("doctor", "Check the store: reachable, durable, versions, permissions, clock, owners, quarantine."),
    "gc": ("gc", "Remove old finished executions, and owners that are dead."),
    "store": ("store", "Look at a store, migrate it, copy it to another, or switch to the other one of a pair."),
    "completion": ("completion", "The completion script for bash, zsh or fish."),
}
"""Every command, the module that has it, and one line about it."""
UNWRITTEN = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LazyGroup(click.Group):
    """Knows every command's name and one line about it; loads a command's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"longrun.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without loading a single command."""
        found = [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command, and end the program with its exit code. Every error is turned into one here."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _open_what_is_closed()
        _let_any_character_pass()
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            code = result if isinstance(result, int) else 0
            sys.stdout.flush()
        except click.ClickException as error:
            code = _show(error)
        except click.Abort:
            code = 130
        except OSError as error:
            if error.errno not in UNWRITTEN:
                raise
            code = _unwritten(error)
        except Exception as error:
            from longrun.cli._errors import report

            code = report(error)
        sys.exit(code)


def _show(error: click.ClickException) -> int:
    """A wrong call: how it is meant, and what was wrong."""
    from longrun.cli._text import clean, hide_secrets, say

    context = getattr(error, "ctx", None)
    if isinstance(context, click.Context):
        say(context.get_usage())
        say(f"Try '{context.command_path} --help' for help.")
    say(f"longrun: {clean(hide_secrets(error.format_message()), lines=True)}")
    return error.exit_code


def _open_what_is_closed() -> None:
    """A stream that was closed for us (`>&-`) leads nowhere: no other file may get its number, and writing is no error.

    The lowest number that is free is taken, so each gets its own."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _let_any_character_pass() -> None:
    """A terminal that cannot show a glyph gets its number: no command fails for that."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # somebody has put another kind of stream there
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _unwritten(error: OSError) -> int:
    """Our output finds no place, or whoever read it has gone (`longrun list | head`), which needs no word."""
    from longrun.cli._text import close, say

    close(sys.stdout)
    if error.errno != errno.EPIPE:
        say(f"longrun: cannot write: {error.strerror}")
    return 1


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="longrun")
def main() -> None:
    """Long-running steps that survive a crash.

    The store is --store, else LONGRUN_STORE, else `store` in longrun.toml or [tool.longrun] of pyproject.toml, else
    file:.longrun. Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 paused or interrupted with a checkpoint, 5 store
    unavailable, 130 Ctrl-C.
    """
