"""I15: whoever can write to the store can change results, and can run nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import longrun

ROOT = Path(__file__).parents[2]
LIBRARY = Path(longrun.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "jsonpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
MAY_IMPORT_BY_NAME = {
    "__init__.py": "its own submodules",
    "stores/__init__.py": "the same",
    "testing/__init__.py": "the same",
    "cli/main.py": "its own commands",
    "cli/dashboard.py": "the dashboard, an extra",
    "cli/_connect.py": "the application that the command line names",
    "child.py": "the function that the program which started the child has registered",
    "testing/crash_child.py": "the registry that a test names",
    "stores/_file/lines.py": "orjson, an extra",
    "seal.py": "zstd, an extra",
    "notebook.py": "IPython, which shows it",
}


def test_hostile_bytes_import_open_and_run_nothing() -> None:
    """Every decoder of stored bytes, fed with noise and with changed good ones, under an audit hook. In a process of
    its own, because an audit hook stays."""
    command = [sys.executable, "-m", "tests.security.fuzz", "150", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    read, refused = map(int, done.stdout.split())
    assert read > 100
    assert refused > 1000


def test_nothing_in_the_library_unpickles_or_evaluates() -> None:
    for file in LIBRARY.rglob("*.py"):
        where = file.relative_to(LIBRARY).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & FORBIDDEN_MODULES, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES, where
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{where}:{node.lineno}"


def test_modules_are_imported_by_name_only_where_no_stored_data_comes() -> None:
    found = {
        file.relative_to(LIBRARY).as_posix()
        for file in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    }
    assert found <= set(MAY_IMPORT_BY_NAME)
