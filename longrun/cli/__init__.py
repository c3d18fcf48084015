"""The command line: `longrun`. Each command is a module, imported when it is called.

Place in the life of an execution: an edge; it speaks to the core as any program would.
"""

from __future__ import annotations

from longrun.cli.main import main

__all__ = ["main"]
