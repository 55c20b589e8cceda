"""Kill writers of one folder at random moments, beside others that write and read it.

Prints how many kills left a folder that is not whole:

    python tests/recordings/killed_writers.py 300
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import hookline as hl
from hookline.files.sealed_json import MANIFEST

N_SITES = 4
LONGEST_S = 0.05  # of a victim's life after its first save


def recorded(number):
    model = nn.Sequential(*[nn.Identity() for _ in range(N_SITES)])
    with hl.record(model, "*") as run:
        model(torch.full((20_000,), float(number)))
    return run


def child(work):
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return process


def killed(folder, seed):
    """Start a process that saves again and again, and kill it at a random moment."""
    read, write = os.pipe()

    def save_for_ever():
        run = recorded(9)
        os.write(write, b"x")
        while True:
            run.save(folder)

    victim = child(save_for_ever)
    os.read(read, 1)
    time.sleep(random.Random(seed).uniform(0, LONGEST_S))
    os.kill(victim, signal.SIGKILL)
    _, status = os.waitpid(victim, 0)
    os.close(read), os.close(write)
    assert os.WIFSIGNALED(status)


def is_whole(folder):
    """Whether the folder holds one recording of one number, every byte of it verified."""
    try:
        opened = hl.open(folder, verify=True)
        return len(opened) == N_SITES and len({one[0].item() for one in opened.values()}) == 1
    except hl.FolderError as error:
        print(error, flush=True)
        return False


def left_over(folder):
    """The names in a folder that its manifest does not have."""
    named = json.loads((folder / MANIFEST).read_text())["checksums"]
    return {*os.listdir(folder)} - {MANIFEST, *named}


def main(n_kills, base):
    folder = base / "run"
    recorded(0).save(folder)
    # First alone: what a kill leaves is opened before anyone else writes.
    n_broken = n_left = 0
    for number in range(n_kills // 2):
        killed(folder, number)
        n_broken += not is_whole(folder)
        n_left += bool(left_over(folder))
    # Then among other writers and readers.
    over = base / "over"

    def write(number):
        run = recorded(number)
        while not over.exists():
            run.save(folder)

    def read():
        while not over.exists():
            assert len(hl.open(folder)) == N_SITES

    others = [child(lambda: write(1)), child(lambda: write(2)), child(read), child(read)]
    for number in range(n_kills // 2, n_kills):
        killed(folder, number)
    over.touch()
    statuses = [os.waitpid(process, 0)[1] for process in others]
    over.unlink()
    n_broken += sum(map(bool, statuses)) + (not is_whole(folder))
    recorded(4).save(folder)
    n_broken += not is_whole(folder) or bool(left_over(folder))
    print(json.dumps({"kills": n_kills, "broken": n_broken, "left files": n_left}))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) > 1:
        main(int(arguments[0]), Path(arguments[1]))
    else:
        with tempfile.TemporaryDirectory() as base:
            main(int(*arguments), Path(base))
