"""Real processes for tests of distributed training: one gloo group for a whole run of pytest.

    @on_ranks
    def test_something(rank, folder):      # runs in each of the two processes
        ...

The fixture `ranks` of `shared_fixtures.py` is the group. A file that needs another number of
processes has its own fixture of that name: `ranks = pytest.fixture(scope="module")(ranks_of(1))`.
After a test has failed in a process, the next test has a new group.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from importlib import util
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from warm import Running

IN_A_PROCESS = "HOOKLINE_TEST_RANK"


def on_ranks(body):
    """A test whose body runs in every process of the fixture `ranks`."""
    if IN_A_PROCESS in os.environ:
        return body

    def test(ranks, tmp_path):
        ranks.run(body.__code__.co_filename, body.__name__, str(tmp_path))

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


def ranks_of(n: int, seconds: float = 60.0):
    """The body of a fixture of processes, started when the first test asks for them."""

    def ranks():
        with Processes(n, seconds) as processes:
            yield processes

    return ranks


class Processes:
    """Processes that wait to be told which function of which file to run."""

    def __init__(self, n: int, seconds: float = 60.0):
        self.n, self.seconds = n, seconds
        self.running: list[Running] = []
        self.lines: list[Connection] = []

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        folder = tempfile.mkdtemp()
        with Listener(f"{folder}/socket", "AF_UNIX") as listener:
            for rank in range(self.n):
                words = (__file__, str(rank), str(self.n), folder)
                environment = {**os.environ, IN_A_PROCESS: str(rank), "OMP_NUM_THREADS": "1"}
                # Neighbours differ in the order of their sets, as processes do.
                of = ("torch torch._dynamo torch.distributed.fsdp", rank % 2)  # DDP imports dynamo
                self.running.append(Running(*words, env=environment, of=of))
            lines = {}
            for _ in range(self.n):
                line = listener.accept()
                lines[line.recv()] = line
            self.lines = [lines[rank] for rank in range(self.n)]

    def stop(self, signal_: int = signal.SIGKILL) -> None:
        for line in self.lines:
            line.close()
        for process in self.running:
            process.end(signal_)
        self.lines, self.running = [], []

    def run(self, file: str, name: str, *args: Any) -> list[Any]:
        """Run a function in each process; what each returned.

        Raises:
            AssertionError: one of them raised, died, or took too long; with what each said.
        """
        said = self.ask(file, name, *args)
        bad = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(said) if kind != "ok"]
        if bad:
            self.stop()  # the ranks that are left may be out of step
            raise AssertionError("\n".join(bad))
        return [value for _, value in said]

    def ask(self, file: str, name: str, *args: Any) -> list[tuple[str, Any]]:
        """Run a function in each process; ("ok", value) or ("raised" or "died" or "hung", text)."""
        if not self.lines:
            self.start()
        for line in self.lines:
            line.send((file, name, args))
        until = time.monotonic() + self.seconds
        said: list[tuple[str, Any]] = []
        for line in self.lines:
            try:
                if line.poll(max(until - time.monotonic(), 0.1)):
                    said.append(line.recv())
                else:
                    said.append(("hung", f"no answer in {self.seconds:g} s"))
            except (EOFError, ConnectionError):
                said.append(("died", "its process has ended"))
        kinds = {kind for kind, _ in said}
        if "hung" in kinds:
            self.stop(signal.SIGABRT)  # each says where it was
        elif "died" in kinds:
            self.stop()
        return said


def main(rank: int, n: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    line = Client(f"{folder}/socket", "AF_UNIX")
    line.send(rank)
    gc.set_threshold(5_000, 20, 100)  # as in pytest's own process: see schedule.py
    modules: dict[str, Any] = {}
    while True:
        try:
            file, name, args = line.recv()
        except EOFError:
            return
        try:
            if file not in modules:
                spec = util.spec_from_file_location(Path(file).stem, file)
                modules[file] = util.module_from_spec(spec)
                spec.loader.exec_module(modules[file])
            given = [Path(args[0]), *args[1:]] if args else []
            line.send(("ok", getattr(modules[file], name)(rank, *given)))
        except Exception:
            line.send(("raised", traceback.format_exc()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
