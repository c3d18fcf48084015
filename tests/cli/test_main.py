"""The command line as a whole: quick, complete, one exit code a kind of error, never a traceback or a password."""

from __future__ import annotations

import errno
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

import longrun
from longrun import errors
from longrun.cli import _errors, main
from longrun.cli._connect import load_object
from longrun.cli.main import COMMANDS
from tests.cli.conftest import APP, call, environment, finished, prepare, read, shown


def test_help_names_every_command_without_loading_any() -> None:
    shown = call("--help").stdout
    assert [name for name in COMMANDS if not re.search(rf"^  {name} ", shown, re.MULTILINE)] == []
    wanted = "demo run list show watch pause resume cancel retry signal fork delete events workers worker dashboard"
    assert {*wanted.split(), "plan", "doctor", "gc", "store"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name: str) -> None:
    shown = call(name, "--help").stdout
    assert shown.startswith(f"Usage: longrun {name}")
    assert main.get_command(None, name).name == name  # type: ignore[arg-type, union-attr]


def test_version() -> None:
    assert longrun.__version__ in call("--version").stdout


def uncounted() -> dict[str, str]:
    """For a process whose start is looked at: whoever counts coverage must not load anything into it."""
    return {name: value for name, value in environment().items() if name != "COVERAGE_PROCESS_CONFIG"}


def test_start_up_is_about_as_quick_as_importing_click() -> None:
    """The limit is 2.5. Processor time, the best of several in turn: the machine may be busy with other things."""

    def seconds(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=uncounted())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = [(seconds("-m", "longrun", "--help"), seconds("-c", "import click")) for _ in range(7)]
    assert min(ours for ours, _ in times) < 2.5 * min(click for _, click in times)


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom longrun.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'anyio', 'attrs', 'rich', 'structlog', 'asyncio', 'sqlite3', 'longrun.executor', 'longrun.stores'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=uncounted(), check=True)
    assert done.stderr.strip() == "[]"


def test_every_export_is_what_type_checkers_are_told() -> None:
    """The lazy names and the imports for type checkers are two lists that must be one."""
    source = Path(longrun.__file__).read_text()
    told = {
        name: module
        for module, name in re.findall(r"^    from longrun\.(\w+) import (\w+) as \2$", source, re.MULTILINE)
    }
    assert told == longrun._WHERE
    for name in longrun.__all__:
        assert getattr(longrun, name) is not None


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ExecutionNotFoundError("a"), 3),
        (errors.ExecutionExistsError("a", "b", "c"), 2),
        (errors.ConfigError("a", 1, "b"), 2),
        (errors.InvalidIdError("..", "no"), 2),
        (errors.UnknownWorkflowError("a"), 2),
        (errors.ExecutionFailedError("a"), 1),
        (errors.ExecutionCancelledError("a"), 1),
        (errors.ExecutionBlockedError("a"), 1),
        (errors.InvalidStateError("a", "failed", "pause"), 1),
        (errors.StoreUnavailableError("file", "gone"), 5),
        (errors.StoreSettingsError("file", "bad"), 5),
        (errors.MissingExtraError("x", "y"), 5),
        (errors.NewerFormatError("x", 2, 1), 5),
        (errors.CorruptDataError("x", "y"), 1),
        (TimeoutError("late"), 1),
        (KeyboardInterrupt(), 130),
        (BaseExceptionGroup("both", [ValueError("x"), errors.ExecutionNotFoundError("a")]), 3),
    ],
)
def test_every_expected_error_has_its_code(error: BaseException, code: int) -> None:
    assert _errors.report(error) == code


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        _errors.report(ZeroDivisionError())


def test_every_error_of_the_library_is_expected() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LongrunError)]
    assert all(any(issubclass(kind, known) for known, _ in _errors.CODES) for kind in kinds)


def test_usage_is_2(url: str) -> None:
    assert "Try 'longrun show --help'" in call("show", code=2).stderr
    call("shwo", code=2)
    call("list", "--state", "asleep", code=2)
    call("list", "--since", "yesterday-ish", code=2)
    prepare(url)
    call("show", "../etc", "--store", url, code=2)
    call("list", "--store", "ftp://x", code=5)


def test_options_that_mean_nothing_are_2(file_url: str) -> None:
    prepare(file_url, finished("site", {}, "a"))
    for words, said in (
        (["gc", "--older-than", "soon"], "give a duration: 90s"),
        (["list", "--meta", "customer"], "an equals sign"),
        (["list", "--meta", "=ACME"], "an equals sign"),
        (["fork", "a", "--checkpoint", "1", "--from", "report"], "not both"),
        (["fork", "a", "--from", "9" * 5000], "no kept checkpoint stands before"),
        (["watch", "--interval", "nan"], "nan is not finite"),
        (["watch", "--interval", "inf"], "inf is not finite"),
        (["list", "--loop", "x"], "No such option"),
    ):
        assert said in call(*words, "--store", file_url, code=2).stderr
    assert "give the options behind limit" in call("queues", "--json", "limit", "gpu", "--off", code=2).stderr
    assert "which application?" in call("worker", "--store", file_url, code=2).stderr
    assert "is no module:name" in call("run", "what is this", "site", code=2).stderr


def test_what_the_environment_cannot_mean_is_2(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(file_url)
    monkeypatch.setenv("LONGRUN_MAX_AGE", "some")
    assert "max_age is a duration" in call("gc", "--store", file_url, code=2).stderr
    monkeypatch.setenv("LONGRUN_LOG_LEVEL", "loud")
    assert "the log level is one of" in call("worker", APP, "--store", file_url, code=2).stderr


def test_a_loop_that_is_not_installed_is_2(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio", None)
    assert "pip install trio" in call("run", APP, "site", "--store", file_url, "--loop", "trio", code=2).stderr


def test_metrics_on_a_port_that_is_taken_are_2(file_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = call("worker", APP, "--store", file_url, "--metrics-port", str(port), code=2).stderr
    assert f"metrics cannot be served on 127.0.0.1:{port}: Address already in use" in said


def test_metrics_on_a_port_or_host_that_cannot_be_are_2(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRUN_METRICS_PORT", "999999")
    assert "127.0.0.1:999999: bind(): port must be" in call("worker", APP, "--store", file_url, code=2).stderr
    monkeypatch.setenv("LONGRUN_METRICS_PORT", "0")
    monkeypatch.setenv("LONGRUN_METRICS_HOST", "a" * 300)
    assert "label too long" in call("worker", APP, "--store", file_url, code=2).stderr


DEEP = "[" * 60_000 + "]" * 60_000


@pytest.mark.parametrize(
    "words",
    [
        ["run", APP, "site", "--state", DEEP],
        ["run", APP, "site", "--meta", f"key={DEEP}"],
        ["list", "--meta", f"key={DEEP}"],
        ["signal", "a", "go", "--payload", DEEP],
        ["resume", "a", "--set-state", DEEP],
        ["retry", "a", "--set-state", DEEP],
        ["fork", "a", "--set-state", DEEP],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_json_that_is_too_deep_to_be_read_is_2(file_url: str, words: list[str]) -> None:
    assert "the JSON is nested too deeply" in call(*words, "--store", file_url, code=2).stderr


def test_what_is_no_number_of_json_is_none(file_url: str) -> None:
    """As metadata it is a word, like everything that is no JSON."""
    call("run", APP, "site", "--state", '{"pages": 1}', "--meta", "ratio=NaN", "--store", file_url)
    assert read("list", "--meta", "ratio=NaN", "--store", file_url)["executions"][0]["metadata"] == {"ratio": "NaN"}
    words = ["run", APP, "site", "--state", '{"pages": NaN}', "--store", file_url]
    assert "--state is no JSON: there is no NaN" in call(*words, code=2).stderr


def test_a_developer_is_shown_where_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGRUN_DEBUG", "1")
    (tmp_path / "broken_for_debug.py").write_text("raise RuntimeError('no way')\n")
    with pytest.raises(click.UsageError, match=r"Traceback(.|\n)*broken_for_debug.py(.|\n)*no way"):
        load_object("broken_for_debug:registry")
    assert _errors.report(errors.StoreUnavailableError("redis", "redis://me:s3cret@host is away")) == 5
    said = capsys.readouterr().err
    assert "StoreUnavailableError" in said
    assert "s3cret" not in said


def test_the_group_can_be_part_of_another_program(file_url: str) -> None:
    """Without `standalone_mode`, errors and results are the caller's."""
    prepare(file_url, finished("site", {}, "a"))
    assert main(["list", "--store", file_url, "--json"], standalone_mode=False) in (None, 0)
    with pytest.raises(errors.ExecutionNotFoundError):
        main(["show", "nope", "--store", file_url], standalone_mode=False)
    assert main.list_commands(click.Context(main)) == list(COMMANDS)


def test_an_error_of_the_system_is_not_taken_for_a_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a broken pipe is: anything else is a defect, and shows itself."""

    def fails(self: object, *args: object, **options: object) -> None:
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(click.Group, "main", fails)
    with pytest.raises(OSError, match="the disk"):
        main(["list"])


def test_not_found_is_3(url: str) -> None:
    prepare(url)
    for words in (["show"], ["events"], ["pause"], ["resume"], ["cancel"], ["retry"], ["delete"], ["fork"], ["plan"]):
        assert "there is no execution 'nope'" in call(*words, "nope", "--store", url, code=3).stderr
    call("signal", "nope", "go", "--store", url, code=3)


def test_store_unavailable_is_5_and_looking_leaves_no_store_behind(tmp_path: Path) -> None:
    for words in (["list"], ["show", "a"], ["watch", "--once"], ["doctor"], ["cancel", "a"], ["store", "info"]):
        assert "there is none" in call(*words, "--store", f"file:{tmp_path / 'nowhere'}", code=5).stderr
        call(*words, "--store", f"sqlite:///{tmp_path / 'nowhere.db'}", code=5)
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "nowhere.db").exists()
    call("list", "--store", "redis://127.0.0.1:1/0", code=5)


def test_a_password_never_shows(tmp_path: Path) -> None:
    for url in ("postgresql://me:s3cret@127.0.0.1:1/db?connect_timeout=2", "redis://me:s3cret@127.0.0.1:1/0"):
        for words in (["list"], ["doctor"], ["run", APP, "site", "--id", "a"]):
            assert "s3cret" not in call(*words, "--store", url, code=5).output
    assert "s3cret" not in call("list", "--store", "nowhere://me:s3cret@host", code=5).output


def test_an_application_that_does_not_import_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken_app.py").write_text("import sys\n\nraise RuntimeError('no \\x1b[31m way')\n")
    shown = call("run", "broken_app:registry", "x", code=2).stderr
    assert "RuntimeError: no \\x1b[31m way" in shown
    assert "broken_app.py, line 3" in shown
    assert "has no" in call("run", "tests.cli.sample_app:nothing", "x", code=2).stderr
    assert "not a StepRegistry" in call("run", "tests.cli.sample_app:HOSTILE", "x", code=2).stderr
    assert "which workflow?" in call("run", APP, code=2).stderr
    assert "no workflow named 'x'" in call("run", APP, "x", code=2).stderr


@pytest.mark.parametrize("code", ["0", "", "'bye'"])
def test_an_application_that_ends_the_program_does_not_end_ours(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    prepare(file_url)
    (tmp_path / "exiting_app.py").write_text(f"import sys\n\nsys.exit({code})\n")
    monkeypatch.setenv("LONGRUN_STORE", file_url)
    for words in (["plan", "--app"], ["worker"], ["run"], ["list", "--store"]):
        said = call(*words, "exiting_app:registry", code=2).stderr
        assert "cannot import 'exiting_app': SystemExit" in said
        assert "exiting_app.py, line 3" in said


def test_what_breaks_in_an_application_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "breaking_places.py").write_text(
        "import sys\nfrom longrun import StoreUnavailableError\n"
        "def store():\n    raise RuntimeError('redis://me:s3cret@host is away')\n"
        "def ends():\n    sys.exit(0)\n"
        "def away():\n    raise StoreUnavailableError('redis', 'it is away')\n"
        "class Lazy:\n    @property\n    def registry(self):\n        raise ValueError('not yet')\n"
        "lazy = Lazy()\n"
    )
    said = call("list", "--store", "breaking_places:store", code=2).stderr
    assert "'breaking_places:store' makes no store: RuntimeError: redis://me:***@host is away" in said
    assert "breaking_places.py, line 4)" in said
    assert "makes no store: SystemExit: 0" in call("list", "--store", "breaking_places:ends", code=2).stderr
    assert "it is away" in call("list", "--store", "breaking_places:away", code=5).stderr
    said = call("run", "breaking_places:lazy.registry", "x", code=2).stderr
    assert "cannot read 'lazy.registry' of 'breaking_places': ValueError: not yet" in said


@pytest.mark.parametrize("name", ["types.py", "app.v2.py", "click.py", "__main__.py"])
def test_a_file_is_the_application_whatever_its_name_means_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_text("mine = []\n")
    known = sys.modules.get(name.removesuffix(".py"))
    assert load_object(f"files/{name}:mine") == []
    assert load_object(f"files/{name}:mine") is load_object(f"{tmp_path}/files/{name}:mine"), "it is imported once"
    assert sys.modules.get(name.removesuffix(".py")) is known


def test_a_file_that_others_import_by_its_name_is_the_same_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "imported_by_name.py").write_text("mine = []\n")
    mine = load_object("imported_by_name.py:mine")
    assert mine is sys.modules["imported_by_name"].mine
    with pytest.raises(click.UsageError, match="No such file"):
        load_object("nowhere_at_all.py:mine")
    (tmp_path / "breaks.v2.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(click.UsageError, match="ZeroDivisionError"):
            load_object("breaks.v2.py:mine")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m longrun {command}"
    return subprocess.run(
        ["bash", "-c", command], check=False, env=environment(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_does_not_depend_on_somebody_who_reads(file_url: str, closed: str) -> None:
    done = shell(f"run {APP} site --id a --state '{{\"pages\": 1}}' --store {file_url} {closed}")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert '"pages": 1' in done.stdout or ">&-" in closed.split()
    assert shown(file_url, "a")["execution"]["state"] == "completed"


def test_output_that_finds_no_place_is_said_and_1(file_url: str) -> None:
    prepare(file_url, finished("site", {}, "a"))
    done = shell(f"show a --store {file_url} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "longrun: cannot write: No space left on device\n")
    done = shell(f"show nope --store {file_url} 2> /dev/full")
    assert done.returncode == 3, "nobody can be told, but the code says it"


def test_a_working_directory_that_is_gone_is_not_needed(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(file_url, finished("site", {}, "a"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "a" in call("list", "--store", file_url).stdout
    assert "1 execution" in call("plan", "a", "--app", APP, "--store", file_url).stderr
    assert "cannot import 'app.py'" in call("run", "app.py:registry", "--store", file_url, code=2).stderr


def test_a_reader_that_leaves_early_is_no_error(file_url: str) -> None:
    prepare(file_url, finished("site", {}, "a"))
    command = f"{sys.executable} -m longrun show a --json --store {file_url} | true"
    done = subprocess.run(
        ["bash", "-c", command], check=False, env=environment(), capture_output=True, text=True, timeout=30
    )
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    assert "_LONGRUN_COMPLETE" in call("completion", shell).stdout


def test_commands_complete_without_being_loaded() -> None:
    words = {"_LONGRUN_COMPLETE": "bash_complete", "COMP_WORDS": "longrun wor", "COMP_CWORD": "1"}
    script = "import sys\nfrom longrun.cli import main\nmain(prog_name='longrun')"
    done = subprocess.run([sys.executable, "-c", script], check=False, env=environment(**words), stdout=-1, text=True)
    assert done.stdout.split() == ["plain,workers", "plain,worker"]


def test_the_dashboard_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name == "uvicorn" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert "pip install 'longrun[web]'" in call("dashboard", code=5).stderr


def test_the_demo_kills_itself_and_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "longrun", "demo"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stdout
    assert "no finished step ran twice, and no page was lost" in done.stdout


def test_the_demo_keeps_its_directory_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = call("demo", "--keep").stdout
    (kept,) = tmp_path.glob("longrun-demo-*")
    assert kept.name in shown.replace("\n", "")
    assert (kept / "effects.log").exists()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["-c", "raise SystemExit(7)"], "the first run ended early, with exit code 7"),
        (["-c", "import sys; print(*(f'1 page {n}' for n in range(100)), sep='\\n', file=open(sys.argv[1], 'w'))"], ""),
    ],
)
def test_a_demo_that_does_not_go_as_it_should_says_so(
    monkeypatch: pytest.MonkeyPatch, program: list[str], said: str
) -> None:
    """Its program ends by itself; or it ends well without having done everything."""
    real = subprocess.Popen

    def other(command: list[str], **options: object) -> object:
        log = str(Path(command[-1]) / "effects.log")
        return real([sys.executable, *program, log], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", other)
    result = call("demo", code=1)
    assert said in result.output
    if not said:
        assert "lost: [100, 101" in result.output.replace("\n", " ")
