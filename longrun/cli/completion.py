"""`longrun completion SHELL`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from longrun.cli._text import out

WHERE = {
    "bash": 'eval "$(longrun completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(longrun completion zsh)"   in ~/.zshrc',
    "fish": "longrun completion fish > ~/.config/fish/completions/longrun.fish",
}


@click.command("completion", epilog="\b\nTo switch it on:\n" + "\n".join(f"  {line}" for line in WHERE.values()))
@click.argument("shell", type=click.Choice([*WHERE]))
def completion_command(shell: str) -> None:
    """Print the completion script for a shell."""
    from longrun.cli.main import main

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    out(kind(main, {}, "longrun", "_LONGRUN_COMPLETE").source())
