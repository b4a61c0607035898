"""The entry point of every process that `fullshard launch` starts: prepares the process and runs the user's script.

Only the standard library, `fullshard/__init__.py`, `engines.py`, `log_filter.py`, `redaction.py` and
`hf/patches.py` are imported here; the script imports the rest. A user error is passed to the launcher, which
prints it once for all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PARENT = "FULLSHARD_LAUNCHER_PID"
COMMAND_VARIABLE = "FULLSHARD_COMMAND"
"""The script and its arguments as JSON, where the command line of a process leaves out secrets."""
EXIT_USER_ERROR = 2
EXIT_RANK_LOST = 69
"""Another rank is gone; this rank did nothing wrong. The same as `errors.RankLostError.exit_code`."""


def main(words: list[str]) -> None:
    """`worker.py file|module|program SCRIPT ARGUMENTS…`"""
    kind, script, *arguments = words
    if whole := os.environ.pop(COMMAND_VARIABLE, None):  # not for processes that this one starts
        script, *arguments = json.loads(whole)
    _end_with_launcher()
    if os.environ.get("ACCELERATE_CPU_AFFINITY") == "1":
        _keep_own_cores()
    if kind == "program":
        os.execvp(script, [script, *arguments])
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if kind == "module" else str(Path(script).resolve().parent)
    with contextlib.suppress(ImportError):  # not on the script's path
        from fullshard.config import redaction
        from fullshard.distributed import log_filter

        log_filter.install_filters()
        redaction.learn_words(sys.argv)
    if not script.startswith("fullshard."):  # our own commands need no integrations
        with contextlib.suppress(ImportError):
            from fullshard.hf import patches

            patches.install()
    _leave(_run(kind, script))


def _run(kind: str, script: str) -> int:
    """Run the script as Python would; returns its exit code."""
    try:
        if kind == "module":
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the user interrupted it: no traceback, on any rank
    except BaseException as error:
        error = _cause(error)
        if _is_user_error(error):
            _report(str(error), getattr(error, "at", ""))
            return int(getattr(error, "exit_code", EXIT_USER_ERROR))
        if isinstance(error, KeyboardInterrupt) and script.startswith("fullshard."):
            return 128 + signal.SIGINT  # our own commands: the launcher has reported it
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            shown = shown.tb_next  # the user's own frames only
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        return 1
    return 0


def _leave(code: int) -> None:
    """Exit like Python (threads, exit functions, buffers), but without destroying objects.

    Destroying torch's communicators can take seconds, and sometimes aborts a process whose work is done.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    """Ask Linux to kill this process when the launcher ends, for whatever reason."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        sys.exit(1)


def _keep_own_cores() -> None:
    """Bind this process to its share of the available CPU cores."""
    if not hasattr(os, "sched_setaffinity"):  # not on macOS
        return
    local, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[local * len(cores) // count : (local + 1) * len(cores) // count]
    if mine:  # with more processes than cores there is nothing to divide
        os.sched_setaffinity(0, mine)


def _cause(error: BaseException) -> BaseException:
    """The lost rank behind an error, if there is one: libraries only report that their communication was aborted."""
    watch = sys.modules.get("fullshard.distributed.watchdog.watch")
    return (watch.cause(error) if watch is not None and isinstance(error, RuntimeError) else None) or error


def _is_user_error(error: BaseException) -> bool:
    errors = sys.modules.get("fullshard.config.errors")  # if it was never imported, the error is not ours
    return errors is not None and isinstance(error, errors.UserError)


def _report(message: str, at: str) -> None:
    with contextlib.suppress(ImportError):
        from fullshard.config.redaction import hide

        message = hide(message)
    path = os.environ.get(ERROR_FILE)
    if path is None:
        from fullshard.distributed.terminal_text import (
            print_text,  # the error is one of fullshard's, so it can be imported
        )

        print_text(f"fullshard: rank {os.environ.get('RANK', '0')}: {message}", sys.stderr)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"message": message, "at": at}))


if __name__ == "__main__":
    main(sys.argv[1:])
