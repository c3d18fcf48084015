"""The command group. Importing it costs click and nothing else: `longrun --help` must be quick."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "demo": "Run a workflow, kill it with SIGKILL in the middle of a step, and watch it go on.",
}


class LazyGroup(click.Group):
    """Knows every command's name and one line about it; loads a command's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"longrun.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="longrun", prog_name="longrun")
def main() -> None:
    """Long-running steps that survive a crash."""
