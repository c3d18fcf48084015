"""Exit codes, and the one place where errors become a line and a code. An expected error never shows a traceback.

0  ok
1  an execution failed, was cancelled or is blocked; a request was refused; a check found something
2  usage: a wrong option, name, id or state
3  there is no such execution
4  paused or interrupted, with a checkpoint
5  the store cannot be used or does not answer
130  Ctrl-C
"""

from __future__ import annotations

import os
import traceback

from longrun import errors
from longrun.cli._text import clean, hide_secrets, say

OK, FAILED, USAGE, NOT_FOUND, INTERRUPTED, UNAVAILABLE, CTRL_C = 0, 1, 2, 3, 4, 5, 130

CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, CTRL_C),
    (errors.ExecutionNotFoundError, NOT_FOUND),
    (errors.ExecutionExistsError, USAGE),
    (errors.ConfigError, USAGE),
    (errors.InvalidIdError, USAGE),
    (errors.RegistrationError, USAGE),
    (errors.UnknownStepError, USAGE),
    (errors.UnknownWorkflowError, USAGE),
    (errors.LeaseLostError, FAILED),
    (errors.StoreError, UNAVAILABLE),
    (errors.NewerFormatError, UNAVAILABLE),
    (errors.LongrunError, FAILED),
    (TimeoutError, FAILED),
)
"""The first that fits counts."""


def unwrapped(error: BaseException) -> BaseException:
    """The error that matters of a group of them: an expected one, if there is any."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [unwrapped(one) for one in error.exceptions]
    return next((one for one in found if code_of(one) is not None), found[0])


def code_of(error: BaseException) -> int | None:
    """The exit code of an expected error; None for a defect."""
    return next((code for kind, code in CODES if isinstance(error, kind)), None)


def report(error: BaseException) -> int:
    """Say what went wrong, on standard error, and give the exit code; raise what nobody expected."""
    error = unwrapped(error)
    code = code_of(error)
    if code is None:
        raise error
    if os.environ.get("LONGRUN_DEBUG"):
        say(clean(hide_secrets("".join(traceback.format_exception(error))), lines=True))
    elif code != CTRL_C:
        say(f"longrun: {sentence(error)}")
    return code


def sentence(error: BaseException) -> str:
    """An error's own sentence, without credentials and control characters."""
    return clean(hide_secrets(str(error) or type(error).__name__), limit=2000)
