"""What the documentation says is true: its programs run, its tables are those of the code, its links lead somewhere.

How the blocks of a page are taken, one after the other, in a process and a directory of the page's own:

    ```python                       runs, in the page's one namespace; a bare `await` is allowed
    ```python title="app.py"        is saved under that name, for the blocks behind it
    ```python title="not tested: …" is compiled, and its calls of an executor are checked against their signatures
    ```sh                           runs, if it has commands of longrun or python; `# exit code 4` says which one it has
    ```text                         is what the block before it prints; `…` stands for anything

    python tests/test_docs.py       writes the pages that are made from the code
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import inspect
import io
import itertools
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
READ_FIRST = (ROOT / "README.md", DOCS / "tutorial.md")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]*)"')
SELF = re.compile(r"self\.(\w+)(?=[^=]*=)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
NOT_RUN = "not tested: "
COMMANDS = ("longrun ", "python ")
GENERATED = "<!-- Made from the code by `python tests/test_docs.py`. -->"


# -- the blocks of a page ----------------------------------------------------------------------------------------------


@frozen
class Block:
    language: str
    title: str
    text: str
    line: int

    @property
    def runs(self) -> bool:
        """A block that begins with `await` is a list of calls in the reader's own program: there is nothing to run."""
        if self.title.startswith(NOT_RUN):
            return False
        if self.language == "sh":
            return any(COMMANDS[0] in f" {line}" or COMMANDS[1] in line for line in self.text.splitlines())
        return self.language == "python" and not self.title and not self.text.startswith("await ")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = TITLE.search(rest)
        body = inspect.cleandoc(match["text"]) + "\n" if match["indent"] else match["text"]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, title[1] if title else "", body, line))
    return found


def cases(pages: Iterable[Path]) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def with_programs() -> list[Path]:
    return [page for page in PAGES if any(block.runs for block in blocks_of(page))]


# -- in the process of a page ------------------------------------------------------------------------------------------


def run_page(page: Path) -> None:
    """Run the blocks of a page in order; the first that does not do what it says ends the process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = None
    for block in blocks_of(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "text" and printed is not None:
            check_output(where, block.text, printed)
        printed = None
        if block.title and not block.title.startswith(NOT_RUN):
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.runs:
            printed = run_python(block, where, names) if block.language == "python" else run_shell(block, where)


def run_python(block: Block, where: str, names: dict[str, Any]) -> str:
    import anyio

    code = compile("\n" * block.line + block.text, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if code.co_flags & inspect.CO_COROUTINE:
            anyio.run(lambda: eval(code, names))
        else:
            exec(code, names)
    return printed.getvalue()


def run_shell(block: Block, where: str) -> str:
    done = subprocess.run(["sh", "-c", block.text], capture_output=True, text=True, timeout=60, check=False)
    wanted = re.search(r"# exit code (\d+)", block.text)
    assert done.returncode == int(wanted[1] if wanted else 0), f"{where}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def check_output(where: str, wanted: str, printed: str) -> None:
    pattern = ".*".join(re.escape(part) for part in wanted.strip().split("…"))
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), f"{where}: it prints\n{printed}"


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", cases(READ_FIRST))
def test_the_programs_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    """Those of the other pages: `tests/campaign/test_docs_programs.py`."""
    check_programs(page, tmp_path)


def check_programs(page: Path, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, more in (("longrun", "-m longrun "), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {more}"$@"\n')
        (commands / name).chmod(0o755)
    (work := tmp_path / "work").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("LONGRUN_", "PYTEST_"))},
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{work}:{ROOT}",
        "PYTHONWARNINGS": "error",
        "LONGRUN_RUN_DIR": str(tmp_path / "run"),
        "NO_COLOR": "1",
    }
    plugin = "" if entry_points(group="pytest11", name="longrun") else "-p longrun.testing.plugin "
    some = (
        "not (trio or crash-test or TestMyStore) or finish or create"  # of the crash points and the conformance suite
    )
    environment["PYTEST_ADDOPTS"] = f"{plugin}-k '{some}'"
    command = [sys.executable, str(Path(__file__)), str(page)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", cases(PAGES))
def test_every_python_block_compiles_and_calls_what_an_executor_has(page: Path) -> None:
    from longrun import Executor

    for block in blocks_of(page):
        if block.language == "python":
            code = compile(block.text, f"{page.name}:{block.line}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | 0x400)
            for call in [node for node in ast.walk(code) if isinstance(node, ast.Call)]:
                if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "executor":
                    signature = inspect.signature(getattr(Executor, call.func.attr))
                    signature.bind(None, *call.args, **{one.arg: one.value for one in call.keywords if one.arg})


@pytest.mark.parametrize("page", cases(PAGES))
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_every_page_stands_in_the_navigation() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(leaves(project["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def leaves(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    for entry in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
        yield from leaves(entry)


def test_every_public_name_stands_in_the_reference() -> None:
    import longrun
    import longrun.testing

    told = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    missing = [name for name in {*longrun._WHERE, *longrun.testing.__all__} if not re.search(rf"\b{name}\b", told)]
    assert missing == []


@pytest.mark.parametrize("page", cases(sorted((DOCS / "reference").glob("*.md"))))
def test_the_members_that_the_reference_names_are_shown(page: Path) -> None:
    """One that is inherited is shown only where that is asked for."""
    for path, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE):
        shown = pkgutil.resolve_name(path)
        there = dir(shown) if "inherited_members: true" in options else getattr(shown, "__dict__", ())
        for names in re.findall(r"^ +members:(.*(?:\n +- .*)*)", options, re.MULTILINE):
            assert [name for name in re.findall(r"\w+", names) if name not in there] == [], path


def test_what_only_a_client_has_stands_in_the_reference() -> None:
    from longrun import Client, Executor

    told = (DOCS / "reference" / "running.md").read_text(encoding="utf-8")
    section = told.partition("::: longrun.client.Client\n")[2].partition(":::")[0]
    own = {name for name in vars(Client) if name not in dir(Executor) and not name.startswith("_")}
    assert own
    assert own <= set(re.findall(r"\w+", section))


def test_the_settings_are_those_of_the_code() -> None:
    """The page of settings has every field of the policies and the configuration, with its default and docstring."""
    from longrun import ExecutorConfig, RetentionPolicy, RetryPolicy

    told = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    for kind in (ExecutorConfig, RetryPolicy, RetentionPolicy):
        section = told.partition(f"## {kind.__name__}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", section, re.MULTILINE)
        made, texts = kind(), field_docstrings(kind)
        assert {name: default for name, default, _ in rows} == {
            one.name: shown(getattr(made, one.name)) for one in attrs.fields(kind)
        }
        assert {name: f"{text[0].upper()}{text[1:]}." for name, _, text in rows} == {
            name: cell(text) for name, text in texts.items()
        }


def test_every_field_of_a_record_has_a_docstring() -> None:
    """The reference shows it, and so do editors."""
    from longrun import records

    kinds = [kind for kind in vars(records).values() if isinstance(kind, type) and attrs.has(kind)]
    assert len(kinds) > 8
    for kind in kinds:
        assert [one.name for one in attrs.fields(kind) if one.name not in field_docstrings(kind)] == [], kind


def test_the_kinds_of_checkpoints_are_named_as_they_are_written() -> None:
    """Wherever a row is told: in the reference, as an event, on the page."""
    from longrun import following, stored
    from longrun.dashboard import detail
    from longrun.records import Checkpoint

    told = cell(field_docstrings(Checkpoint)["kind"]).partition(": ")[2].rstrip(".").split(", ")
    assert sorted(told) == sorted(stored.KINDS)
    assert set(following.KINDS) == stored.KINDS
    script = (ROOT / "longrun/dashboard/static/timeline.js").read_text(encoding="utf-8")
    drawn = [word for line in re.findall(r"new Set\(\[(.*)\]\)", script) for word in re.findall(r'"(\w+)"', line)]
    assert drawn
    assert {*detail.UNCHANGING, *drawn} <= stored.KINDS


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return value[0].__name__ if value else "()"
    return f"{type(value).__name__}()" if attrs.has(type(value)) else repr(value)


# -- pages that are made from the code ---------------------------------------------------------------------------------


SETTINGS_TEXT = """\
Settings: {}. A flag counts first, if the command has one; then the environment (`LONGRUN_` and the name in capitals);
then the nearest `longrun.toml`, or `[tool.longrun]` of the nearest `pyproject.toml`, from here upwards;
then the default."""
OUTPUT_TEXT = """\
Data goes to standard output, bars and logs to standard error. Bars are drawn on a terminal only; `NO_COLOR` is
respected. `--json` prints the [documents described here](json.md)."""


def cli_page() -> str:
    from longrun.cli import main
    from longrun.cli._settings import SETTINGS
    from longrun.cli.main import COMMANDS as KNOWN

    parts = [
        "# The command line",
        GENERATED,
        inspect.cleandoc(main.help or "").replace("[tool.longrun]", "`[tool.longrun]`"),
        SETTINGS_TEXT.format(", ".join(f"`{name}`" for name in SETTINGS)),
        OUTPUT_TEXT,
    ]
    for name in KNOWN:
        command = main.get_command(None, name)  # type: ignore[arg-type, unused-ignore]  # needs none
        parts += command_parts(f"longrun {name}", command)
    return "\n\n".join(parts) + "\n"


def command_parts(path: str, command: Any) -> Iterator[str]:
    import click

    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([path, *command.collect_usage_pieces(click.Context(command))])
    yield f"{'##' if path.count(' ') == 1 else '###'} `{path}`"
    yield f"```text\n{usage}\n```"
    yield inspect.cleandoc(command.help or "").replace("<", "&lt;")
    if options:
        rows = [f"| {option_text(one)} | {cell(one.help or '')}{default_text(one)} |" for one in options]
        yield "\n".join(["| option | |", "|---|---|", *rows])
    for name, inner in getattr(command, "commands", {}).items():
        yield from command_parts(f"{path} {name}", inner)


def option_text(one: Any) -> str:
    kind = "" if one.is_flag else one.metavar or "|".join(getattr(one.type, "choices", [])) or one.type.name.upper()
    return f"`{', '.join(one.opts)} {kind}".rstrip().replace("|", "\\|") + "`"


def default_text(one: Any) -> str:
    return f" Default: `{one.default}`." if one.show_default and not one.is_flag else ""


def json_page() -> str:
    from longrun import schema

    told = inspect.cleandoc(schema.__doc__ or "").replace("what `KINDS` says of that kind", "in the tables below")
    parts = ["# JSON output", GENERATED, told]
    for name, fields in schema.KINDS.items():
        rows = [f"| `{field}` | `{cell(kind)}` |" for field, kind in fields.items()]
        parts += [f"## `{name}`", "\n".join(["| field | type |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def records_page() -> str:
    from longrun import events, queues, records

    shown = [(records, "ExecutionState Execution Progress Forecast Checkpoint StepRecord ResumeReport BranchFailure")]
    shown += [(queues, "QueueLimit QueueInfo"), (events, "ExecutionEvent EventType")]
    parts = ["# Records and events", GENERATED, "Frozen values, made with keywords. Import them from `longrun`."]
    for module, names in shown:
        for name in names.split():
            parts += record_parts(getattr(module, name))
    return "\n\n".join(parts) + "\n"


def record_parts(kind: Any) -> Iterator[str]:
    yield f"## {kind.__name__}"
    if kind.__doc__:
        yield inspect.cleandoc(kind.__doc__)
    if issubclass(kind, enum.Enum):
        yield ", ".join(f"`{one.value}`" for one in kind) + "."
        return
    told, fields = field_docstrings(kind), attrs.fields(kind)
    rows = [f"| `{one.name}` | `{cell(str(one.type))}` | {cell(told.get(one.name, ''))} |" for one in fields]
    yield "\n".join(["| field | type | |", "|---|---|---|", *rows])


@functools.cache
def source_of(kind: type) -> str:
    """Kept: to find a class, its whole module is parsed."""
    return inspect.getsource(kind)


def field_docstrings(kind: type) -> dict[str, str]:
    """What stands in a string behind a field of a class."""
    body = ast.parse(source_of(kind)).body[0].body  # type: ignore[attr-defined]  # it is a class
    found = {}
    for field, behind in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            found[ast.unparse(field.target)] = str(behind.value.value)
    return found


def errors_page() -> str:
    import longrun
    from longrun import errors

    tree = inspect.cleandoc((errors.__doc__ or "").partition("::\n\n")[2])
    public = [getattr(errors, name) for name in longrun._NAMES["errors"].split()]
    rows = [f"| `{kind.__name__}` | {error_attributes(kind)} |" for kind in public if error_attributes(kind)]
    parts = [
        "# Errors",
        GENERATED,
        (
            "Import them from `longrun`; `WriteOrderError`, which no caller sees, is in `longrun.errors`. "
            "Each builds its sentence from typed arguments and says what to do next."
        ),
        f"```text\n{tree}\n```",
        f"`StepInterrupted`, which is none of these: {cell(errors.StepInterrupted.__doc__ or '')}",
        "The arguments are attributes too:",
        "\n".join(["| error | attributes |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def error_attributes(kind: type) -> str:
    """What is put on `self`, by the class or by those above it."""
    sources = [source_of(one) for one in kind.__mro__ if one.__module__ == kind.__module__]
    names = [
        name
        for line in re.findall(r"^ +(self\..* = .*)$", "\n".join(sources), re.MULTILINE)
        for name in SELF.findall(line)
    ]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


MAKERS = {"cli": cli_page, "json": json_page, "records": records_page, "errors": errors_page}
MADE = {DOCS / "reference" / f"{name}.md": make for name, make in MAKERS.items()}


@pytest.mark.parametrize("page", cases(list(MADE)))
def test_a_page_made_from_the_code_is_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == MADE[page](), "run: python tests/test_docs.py"


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    from longrun.metrics import INSTRUMENTS, prometheus_name

    told = (DOCS / "how-to" / "observe.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| ([^|]*) \|", told, re.MULTILINE)
    assert rows == [
        (name, prometheus_name(name) + ("_total" if one.kind == "counter" else ""), ", ".join(one.labels) or "–")
        for name, one in INSTRUMENTS.items()
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        run_page(Path(sys.argv[1]))
    else:
        for path, make in MADE.items():
            path.write_text(make(), encoding="utf-8")
