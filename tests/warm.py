"""Python processes that have imported torch: each is forked from one that waits, with one thread.

    done = run_python("-c", "import hookline as hl; print(hl.__version__)")

    process = Running(script, "its", "arguments", env={...})
    ...
    process.end()

A process has its own folder, variables and warnings, and ends by itself. Everything but torch, and
what torch imports, is imported in it. All that are forked from one have its seed of hashes, which
is not that of pytest. For scripts that test how Python or torch starts, such as a package that is
missing, use `subprocess`.

Run as a script, this file is the process that waits.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType


def run_python(
    *arguments: object,
    cwd: object = None,
    env: Mapping[str, str] | None = None,
    of: tuple[str, int] = ("torch", 0),
) -> subprocess.CompletedProcess[str]:
    """Run Python as `python ...` does; as `subprocess.run` with `capture_output` and `text`.

    Args:
        arguments: `-W action` perhaps; then a file, `-c` and code, or `-m` and a module; then
            what `sys.argv` is to hold.
        cwd: the folder to run in.
        env: all variables; those of this process by default.
        of: as that of `Running`.
    """
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in arguments]
    with tempfile.TemporaryDirectory() as folder:
        streams = [f"{folder}/stdout", f"{folder}/stderr"]
        running = Running(*words, cwd=cwd, env=env, streams=streams, of=of)
        code = running.wait()
        texts = [Path(stream).read_text(errors="replace") for stream in streams]
    return subprocess.CompletedProcess([sys.executable, *words], code, *texts)


class Running:
    """A process that runs Python as `python ...` does.

    Args:
        arguments, cwd, env: as those of `run_python`.
        streams: the files to write to; without them, as the process that waits.
        of: the modules that the process that waits has imported, between spaces, and its number:
            each has other hashes.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: object = None,
        env: Mapping[str, str] | None = None,
        streams: Sequence[str] = (),
        of: tuple[str, int] = ("torch", 0),
    ) -> None:
        folder = str(Path.cwd() if cwd is None else cwd)
        self._line = _waiting(*of)
        variables = dict(os.environ if env is None else env)
        self._line.send((list(arguments), folder, variables, streams))
        self._id = self._line.recv()

    def wait(self, signal_: int = 0) -> int:
        """Wait for the end, and give the exit code."""
        self._line.send((self._id, signal_))
        return self._line.recv()

    def end(self, signal_: int = signal.SIGKILL) -> None:
        """Kill the process. After `SIGABRT` it says where it was."""
        self.wait(signal_)


@cache
def _waiting(modules: str, number: int) -> Connection:
    """Start a process that waits: each worker of pytest has its own."""
    folder = tempfile.TemporaryDirectory()
    with Listener(f"{folder.name}/socket", "AF_UNIX") as listener:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, f"{folder.name}/socket", modules],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        line = listener.accept()

    def end() -> None:
        line.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    return line


def _wait(address: str, modules: str) -> list[str]:
    """Fork a process for each request; give that process its arguments, and exit in the other."""
    faulthandler.enable()  # a process that C code ends says where it was
    gc.disable()  # imports leave no garbage, and are slower by a third where it is looked for
    for module in modules.split():
        importlib.import_module(module)
    gc.freeze()  # no process looks for garbage in what it has been given, as it runs or ends
    gc.enable()
    line = Client(address, "AF_UNIX")
    while True:
        try:
            request = line.recv()
        except EOFError:
            raise SystemExit from None
        if len(request) == 2:
            process, signal_ = request
            os.kill(process, signal_)  # 0 kills nothing
            line.send(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            continue
        process = os.fork()
        if process == 0:
            words, folder, variables, streams = request
            line.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(variables)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, stream in enumerate(streams, 1):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
            return words
        line.send(process)


def _run(words: list[str]) -> None:
    """Run a script as Python does when it has just started."""
    warnings.resetwarnings()
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.filterwarnings("ignore", category=category, append=True)
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    if words[0] in ("-c", "-m"):
        sys.path.insert(0, "" if words[0] == "-c" else os.getcwd())
    sys.argv = [words[0], *words[2:]] if words[0] in ("-c", "-m") else words
    if words[0] == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # of this file
    _run(_wait(*sys.argv[1:]))
