"""`python -m longrun` is the command line."""

from __future__ import annotations

from longrun.cli import main

if __name__ == "__main__":
    main(prog_name="longrun")
