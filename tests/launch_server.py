"""Becomes a server that dies with the process which started it. Run as a script, by tests/servers.py.

Usage: launch_server.py PARENT_PID DEATH_SIGNAL UID COMMAND [ARGUMENT ...]

A program of its own, because the order matters: the kernel forgets the death signal when the user changes, and a
function run between fork and exec is not safe in a process with threads. It starts as the tests' user, since the
server's user may not be able to read the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def become_user(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def die_with_parent(parent: int, death_signal: int) -> None:
    """Only Linux has this; elsewhere a killed test run leaves its servers to be ended by hand."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit("the process that wanted this server is gone")


def main() -> None:
    parent, death_signal, uid = (int(argument) for argument in sys.argv[1:4])
    command = sys.argv[4:]
    if uid != os.geteuid():
        become_user(uid)
    die_with_parent(parent, death_signal)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
