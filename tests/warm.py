"""Python processes that have imported torch: each is forked from one that waits, with one thread.

    done = run_python("-c", "import hookline as hl; print(hl.__version__)")

    process = Running(script, "its", "arguments", env={...})
    ...
    process.end()

A process has its own folder, variables and warnings, and ends by itself. Everything but torch, and
what torch imports, is imported in it. All that are forked from one have its seed of hashes, which
is not that of pytest. For scripts that test how Python or torch starts or ends, such as a package
that is missing, use `subprocess`.

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
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import TextIO

TORCH = ("torch", 0)
# What calls torch by a mode, trains or imports torchvision loads dynamo by that: two seconds.
DYNAMO = ("torch torch._dynamo", 0)


def run_python(
    *arguments: object,
    cwd: object = None,
    env: Mapping[str, str] | None = None,
    of: tuple[str, int] = TORCH,
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
        stdin: the file to read.
        of: the modules that the process that waits has imported, between spaces, and a number:
            those of another number have other hashes. It is forked from the one that lacks the
            last module.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: object = None,
        env: Mapping[str, str] | None = None,
        streams: Sequence[str] = (),
        stdin: str = os.devnull,
        of: tuple[str, int] = TORCH,
    ) -> None:
        folder = str(Path.cwd() if cwd is None else cwd)
        self._line = _waiting(*of)
        variables = dict(os.environ if env is None else env)
        self._line.send(("run", list(arguments), folder, variables, [stdin, *streams]))
        self.pid = self._line.recv()
        self._code: int | None = None

    def wait(self, signal_: int = 0) -> int:
        """Wait for the end, and give the exit code."""
        if self._code is None:
            self._line.send(("wait", self.pid, signal_))
            self._code = self._line.recv()
        return self._code

    def end(self, signal_: int = signal.SIGKILL) -> None:
        """Kill the process. After `SIGABRT` it says where it was."""
        self.wait(signal_)


@contextmanager
def talking(
    *arguments: str, of: tuple[str, int] = TORCH
) -> Iterator[tuple[Running, TextIO, TextIO]]:
    """Run Python beside the block: the process, what it reads, and what it writes to both streams.

    What it reads ends with the block, which waits for its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        read, written = f"{folder}/read", f"{folder}/written"
        os.mkfifo(read)
        os.mkfifo(written)
        process = Running(*arguments, stdin=read, streams=[written, written], of=of)
        with open(written) as out:
            with open(read, "w") as in_:
                yield process, in_, out
            process.wait()


@cache
def _waiting(modules: str, number: int) -> Connection:
    """Start a process that waits: each worker of pytest has its own."""
    *before, module = modules.split()
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/socket"
    process = None
    with Listener(address, "AF_UNIX") as listener:
        if before:
            _waiting(" ".join(before), number).send(("import", address, module))
        else:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", __file__, address, module],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        line = listener.accept()

    def end() -> None:
        line.close()
        if process is not None:  # it waits for those that are forked from it
            process.wait()
        folder.cleanup()

    atexit.register(end)
    return line


def _wait(address: str, module: str) -> list[str]:
    """Fork a process for each request; give that process its arguments, and exit in the other."""
    faulthandler.enable()  # a process that C code ends says where it was
    gc.disable()  # imports leave no garbage, and are slower by a third where it is looked for
    importlib.import_module(module)
    gc.freeze()  # no process looks for garbage in what it has been given, as it runs or ends
    gc.enable()
    line = Client(address, "AF_UNIX")
    forked = []
    while True:
        try:
            kind, *request = line.recv()
        except EOFError:
            for process in forked:
                os.waitpid(process, 0)
            os._exit(0)
        if kind == "wait":
            process, signal_ = request
            os.kill(process, signal_)  # 0 kills nothing
            line.send(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            continue
        process = os.fork()
        if process == 0:
            line.close()
            return _wait(*request) if kind == "import" else _prepare(*request)
        if kind == "import":
            forked.append(process)
        else:
            line.send(process)


def _prepare(
    words: list[str], folder: str, variables: Mapping[str, str], streams: Sequence[str]
) -> list[str]:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for number, stream in reversed([*enumerate(streams)]):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
    return words


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
        _end(main)
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _end(main: ModuleType) -> None:
    """End as Python does, but for what was there before the code ran.

    To end that, it is all copied from the process that waits: some 30,000 pages, half a second.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.path.pop(0)  # of this file
    _run(_wait(*sys.argv[1:]))
