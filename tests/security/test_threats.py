"""SECURITY.md names a test for every line, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w/]+\.py|…)(?:::([\w:]+))?`")


def test_every_line_of_the_threat_model_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    table = text.partition("| | checked by |")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    assert len(rows) > 15
    file = ""
    for row in rows:
        found = NAMED.findall(row.split("|")[2])
        assert found, row
        for path, name in found:
            file = path if path != "…" else file
            assert (ROOT / "tests" / file).is_file(), file
            assert not name or name.split("::")[-1] in functions(ROOT / "tests" / file), f"{file}::{name}"


def functions(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
