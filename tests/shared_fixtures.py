"""Fixtures for the tests of all rooms, and the names that the examples of docstrings use."""

from __future__ import annotations

import asyncio
import dis
import gc
import io
import linecache
import shutil
import sys
from collections import OrderedDict
from functools import cache

import numpy.testing  # noqa: F401  # of numpy 1.26: it starts lscpu, which no test is to do
import pytest
import torch
import typer.testing
from torch import nn

import hookline as hl
from hookline.data import guess_input, load_input
from hookline.models import load_demo_digits, load_model
from hookline.statistics.c_functions import compile_difference, compile_moments
from processes import ranks_of
from zoo import Holder, Looped, SmallNet

# typer builds all commands anew for each that a test types.
typer.testing._get_command = cache(typer.testing._get_command)
# On a GPU, gradients of convolutions would else differ from run to run.
torch.backends.cudnn.deterministic = True
if not torch.accelerator.is_available():
    # Each would keep the seed, and the stack of who gave it, for a device that is not there.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None


@pytest.fixture(scope="session", autouse=True)
def _compiled_functions() -> None:
    """Compile the functions in C before the first test, so that no test starts a compiler."""
    compile_moments()
    compile_difference()


@pytest.fixture
def names_in_docstrings(request: pytest.FixtureRequest) -> None:
    """Name what the examples use. `schedule.py` gives it to them."""
    names = request.getfixturevalue("doctest_namespace")
    names.update(
        io=io,
        torch=torch,
        nn=nn,
        hl=hl,
        tmp_path=request.getfixturevalue("tmp_path"),
        guess_input=guess_input,
        load_demo_digits=load_demo_digits,
        load_input=load_input,
        load_model=load_model,
    )
    if any(
        "store" in example.source or '"features"' in example.source
        for example in request.node.dtest.examples
    ):
        layers = OrderedDict(body=nn.Linear(2, 4), fc=nn.Linear(4, 3))
        names["store"] = hl.extract(
            nn.Sequential(layers), torch.rand(100, 2), list(layers), names["tmp_path"] / "features"
        )
    if any("loaded" in example.source for example in request.node.dtest.examples):
        names["loaded"] = load_model("demo:digits")


# Two processes, started for the first test that asks for them, and kept for all files.
ranks = pytest.fixture(scope="session")(ranks_of(2))


@pytest.fixture
def net() -> SmallNet:
    torch.manual_seed(0)
    return SmallNet().eval()


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def looped() -> Looped:
    torch.manual_seed(0)
    return Looped()


@pytest.fixture
def holder() -> Holder:
    return Holder()


def state(model: nn.Module) -> list[object]:
    """All that a line could leave behind: hooks, attributes, modes, numbers, randomness."""
    found: list[object] = [torch.get_rng_state().tolist()]
    for path, module in model.named_modules():
        hooks = {
            name: list(value.items())
            for name, value in vars(module).items()
            if "_hooks" in name and hasattr(value, "items")
        }
        found.append((path, module.training, sorted(vars(module)), hooks))
    found += [(name, t._version, t.tolist()) for name, t in model.state_dict().items()]
    return found


@pytest.fixture
def left_as_found():
    return state


@pytest.fixture(scope="session")
def _chromium():
    """A real Chromium, Debian's; the one without windows, where it is installed.

    It and its driver take a second to start. The driver's event loop runs all the while: to tests
    of other files, which may run their own, it is hidden.
    """
    from playwright.sync_api import sync_playwright  # for the few tests of pages

    place = shutil.which("chromium-headless-shell") or "/usr/bin/chromium"
    one_renderer = ["--renderer-process-limit=1", "--disable-site-isolation-trials"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=place, args=["--no-sandbox", "--disable-gpu", *one_renderer]
        )
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield browser, loop
        asyncio._set_running_loop(loop)
        browser.close()


@pytest.fixture(scope="module")
def browser(_chromium):
    browser, loop = _chromium
    asyncio._set_running_loop(loop)
    yield browser
    for context in browser.contexts:
        context.close()
    asyncio._set_running_loop(None)


def _fresh_dynamo():
    """No compiled code before, none left, and dynamo has the settings that it had."""
    from torch._dynamo import config  # it takes a second to load
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    before = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    yield
    assert config.skip_fwd_side_effects_in_bwd_under_checkpoint is before
    torch.compiler.reset()


fresh_dynamo = pytest.fixture(_fresh_dynamo)
fresh_dynamo_of_file = pytest.fixture(scope="module")(_fresh_dynamo)


@pytest.fixture
def interrupted():
    """`interrupted(step, modules, action)`: whether a Ctrl-C came in the action.

    It comes at the step-th line that is executed in those of hookline's modules whose names begin
    so. At the end of a `with` block tracing stops at its head once more, and at each `try:`, which
    CPython covers by no handler, not even that of the block around it; nor does it cover the end of
    an `except`. No signal is ever handled there: an interrupt would leave a lock held, or an
    exception that is handled for ever, as no real one does.
    """

    def interrupted(step, modules, action):
        count = 0

        def at_line(frame, event, arg):
            nonlocal count
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            is_covered = frame.f_code.co_code[frame.f_lasti] != dis.opmap["POP_EXCEPT"]
            is_line = event == "line" and not text.lstrip().startswith(("with ", "try:"))
            count += is_line and is_covered
            if count == step:
                sys.settrace(before)
                raise KeyboardInterrupt
            return at_line

        def at_call(frame, event, arg):
            name = frame.f_globals.get("__name__", "")
            return at_line if name.startswith(modules) else None

        before = sys.gettrace()
        # A collection calls weak references' callbacks, where Python cannot raise an interrupt.
        gc.disable()
        sys.settrace(at_call)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            gc.enable()
        return False

    return interrupted
