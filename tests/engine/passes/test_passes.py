"""Passes and calls, threads and tasks, and what happens when a pass does not end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine import Pass


def test_each_run_of_the_root_is_a_pass(looped):
    with hl.record(looped) as run:
        for _ in range(4):
            looped(torch.ones(1, 2))
    assert [one.number for one in run.passes] == [0, 1, 2, 3]
    assert all(len(one.calls("block")) == 3 for one in run.passes)
    assert all(one.failed is False for one in run.passes)


def test_a_root_that_calls_itself_stays_in_one_pass():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = nn.Linear(1, 1)

        def forward(self, x, depth):
            return self(x, depth - 1) + self(x, depth - 1) if depth else self.leaf(x)

    tree = Tree()
    with hl.record(tree, ports=("input", "output")) as run:
        tree(torch.ones(1), 2)
        tree(torch.ones(1), 1)
    assert [len(one.calls("leaf")) for one in run.passes] == [4, 2]
    assert [len(one.calls("")) for one in run.passes] == [7, 3]


def test_submodules_run_by_hand_are_in_a_pass_of_their_own(net, image):
    with hl.record(net, "**.conv") as run:
        hidden = net.stem(image)
        net.layer1(hidden)
        net.layer2(hidden)
        net(image)
    by_hand, whole = run.passes
    assert len(by_hand) == 4
    assert len(whole) == 4


@pytest.mark.trap(31)
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_failed_pass_keeps_what_came_before_and_is_marked(error, net, image):
    inside, told, errors = [], [], [error]

    def fail(module, args):
        if errors:
            raise errors.pop()

    handles = [
        net.register_forward_pre_hook(lambda module, args: inside.append("pass")),
        net.register_forward_hook(lambda module, args, output: inside.pop() and None),
        net.register_forward_hook(lambda m, args, output: told.append(output), always_call=True),
    ]
    with hl.record(net, "**.conv") as run, hl.attach(net) as line:
        line.forward_pre("layer2.0", fail)
        with pytest.raises(type(error)):
            net(image)
        net(image)
    for handle in handles:
        handle.remove()
    assert inside == ["pass"]  # a state that only the hook after the forward would have ended
    # An always-called hook is given None for an output, and after Ctrl-C it is not called at all.
    assert [one is None for one in told] == (
        [True, False] if isinstance(error, ValueError) else [False]
    )
    broken, whole = run.passes
    assert (broken.failed, whole.failed) == (True, False)
    assert list(broken) == ["layer1.0.conv", "layer1.1.conv"]
    assert len(whole) == 4


def test_a_model_run_inside_an_except_block_has_not_failed(net, image):
    with hl.record(net, "fc") as run:
        try:
            raise KeyError("unrelated")
        except KeyError:
            net(image)
    assert run.passes[0].failed is False


def test_an_interrupt_that_ends_the_line_leaves_its_pass_failed(net, image):
    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = net.layer2.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), hl.record(net, "**.conv") as run:
        net(image)
    handle.remove()
    (only,) = run.passes
    assert only.failed is True


def test_a_line_ended_inside_the_forward_has_seen_no_failure(net, image):
    line = hl.record(net, "layer1.*.conv")
    handle = net.layer2.register_forward_pre_hook(lambda module, args: line.remove())
    net(image)
    handle.remove()
    (only,) = line.recording.passes
    assert only.failed is False
    assert list(only) == ["layer1.0.conv", "layer1.1.conv"]


def test_two_threads_that_share_a_model_record_apart(net, image):
    barrier = threading.Barrier(2)
    expected = {k: net.stem(image * k) for k in (1, 2)}

    def work(factor):
        with hl.record(net, ["stem", "fc"]) as run:
            barrier.wait()
            for _ in range(20):
                net(image * factor)
            barrier.wait()
        return run

    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip((1, 2), pool.map(work, (1, 2)), strict=True))
    for factor, run in runs.items():
        assert len(run.passes) == 20
        assert all(torch.equal(one["stem"], expected[factor]) for one in run.passes)


def test_two_threads_that_share_a_model_edit_apart(net, image):
    plain = net(image)
    barrier = threading.Barrier(2)

    def work(factor):
        with hl.edit(net, "fc", hl.edits.scale(factor)):
            barrier.wait()
            results = [net(image) for _ in range(20)]
            barrier.wait()
        return all(torch.equal(y, plain * factor) for y in results)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, (0.0, 3.0)))


def test_async_tasks_that_share_a_model_record_apart(net, image):
    async def work(factor):
        with hl.record(net, "stem") as run:
            for _ in range(5):
                await asyncio.sleep(0)
                net(image * factor)
        return run

    async def both():
        return await asyncio.gather(work(1), work(2))

    for factor, run in zip((1, 2), asyncio.run(both()), strict=True):
        assert len(run.passes) == 5
        assert all(torch.equal(one["stem"], net.stem(image * factor)) for one in run.passes)


def test_a_model_run_in_another_thread_is_not_seen_and_said_so(net, image):
    with (
        pytest.warns(hl.HooklineWarning, match=r"saw nothing: the model ran in another thread"),
        hl.record(net, "fc") as run,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(net, image).result()
    with pytest.raises(hl.NotRecordedError, match="copy_context"):
        run["fc"]


def test_a_copied_context_brings_the_line_along(net, image):
    with hl.record(net, "fc") as run, ThreadPoolExecutor(1) as pool:
        pool.submit(contextvars.copy_context().run, net, image).result()
    assert torch.equal(run["fc"], net(image))


def test_a_line_of_every_thread_keeps_the_passes_of_each_apart(looped):
    line = hl.record(looped, "block", every_thread=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(looped, [torch.full((1, 2), float(k)) for k in range(40)]))
    line.remove()
    assert len(line.recording.passes) == 40
    assert all(len(one.calls("block")) == 3 for one in line.recording.passes)


def test_a_line_ends_in_another_context_than_it_began_in(net, image, left_as_found):
    before = left_as_found(net)
    line = hl.record(net, "fc")
    contextvars.copy_context().run(line.__enter__)
    net(image)
    line._line.options.quiet = True
    line.__exit__(None, None, None)
    assert left_as_found(net) == before


def test_nested_lines_each_see_the_model_and_the_inner_edit(net, image):
    with hl.record(net, "fc") as outer:
        net(image)
        with hl.edit(net, "fc", hl.edits.scale(0)), hl.record(net, "fc") as inner:
            net(image)
        net(image)
    assert [bool(one["fc"].any()) for one in outer.passes] == [True, False, True]
    assert not inner["fc"].any()


def test_overlapping_lines_end_in_any_order(net, image):
    first, second = hl.record(net, "fc"), hl.record(net, "fc")
    net(image)
    first.remove()
    net(image)
    second.remove()
    assert (len(first.recording.passes), len(second.recording.passes)) == (1, 2)


def test_features_inside_a_line_end_its_pass_without_a_failure(net, image):
    with hl.record(net, "**.conv") as run:
        hl.features(net, image, "layer1.0.conv")
        net.layer2(net.stem(image))
        net(image)
    assert [one.failed for one in run.passes] == [False, False, False]
    assert [len(one) for one in run.passes] == [1, 2, 4]


def test_features_in_a_models_hook_leave_the_outer_pass_whole(net, image):
    seen = []

    def look(module, args, output):
        if not seen:
            seen.append(None)
            seen[0] = hl.features(net, image * 2, "stem")["stem"]

    with hl.record(net, ["stem", "fc"]) as run, hl.attach(net) as line:
        line.forward("layer1", look)
        y = net(image)
    assert torch.equal(seen[0], net.stem(image * 2))
    (only,) = run.passes
    assert only.failed is False
    assert torch.equal(only["fc"], y)
    assert len(only.calls("stem")) == 2


def test_a_line_closed_in_another_thread_keeps_nothing_alive(net, image):
    line = hl.record(net, "fc")
    run = line.__enter__()
    net(image)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(line.__exit__, None, None, None).result()
    with hl.record(net, "fc"):  # the next line sweeps what the other left in this context
        net(image)
    dead = weakref.ref(run)
    del run, line
    gc.collect()
    assert dead() is None


def test_runs_elsewhere_are_counted_as_runs(net, image):
    line = hl.record(net)
    with line as run, ThreadPoolExecutor(1) as pool:
        net(image)
        for _ in range(2):
            pool.submit(net, image).result()
    assert run.report().other_contexts == 2


class EndsTheLine:
    """A lock that another thread gets just before: there it ends the line."""

    def __init__(self, line):
        self.line, self.held = line, line.passes.lock

    def __enter__(self):
        self.line.passes.lock = self.held
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.line.remove).result()

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize(("part", "site"), [("", ":input"), ("", "stem"), ("stem", "stem")])
def test_nothing_is_edited_after_another_thread_ends_the_line(net, image, part, site):
    expected = net.get_submodule(part)(image)
    line = hl.edit(net, site, hl.edits.scale(0), every_thread=True)
    line.options.quiet = True
    line.passes.lock = EndsTheLine(line)
    assert torch.equal(net.get_submodule(part)(image), expected)


def test_a_pass_begun_as_another_thread_ends_the_line_is_ended(net, image):
    line = hl.record(net, "stem", every_thread=True)
    line._line.options.quiet = True
    passes, begins, may_begin = line._line.passes, threading.Event(), threading.Event()
    held = passes.lock

    class Tells:  # when the thread that ends the line has to wait
        def __enter__(self):
            if begins.is_set():
                may_begin.set()
            held.acquire()

        def __exit__(self, *_):
            held.release()

    def numbers():
        begins.set()
        assert may_begin.wait(60)
        yield 0

    passes.lock, passes._numbers = Tells(), numbers()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(net, image)
        assert begins.wait(60)
        ending = pool.submit(line.remove)
        ending.add_done_callback(lambda _: may_begin.set())  # it did not wait
        ending.result()
        running.result()
    assert [one.failed for one in line.recording.passes] == [False]
    assert line.report().passes == 1


def test_a_line_ended_while_another_thread_runs_ends_its_pass(net, image):
    reached, go_on = threading.Event(), threading.Event()

    def wait(module, args):
        reached.set()
        assert go_on.wait(60)

    line = hl.record(net, "stem", every_thread=True)
    handle = net.layer2.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(net, image)
        assert reached.wait(60)
        line.remove()
        go_on.set()
        running.result()
    handle.remove()
    (only,) = line.recording.passes
    assert only.failed is False
    assert torch.equal(only["stem"], net.stem(image))


class Stepped(nn.Module):
    """Trains as a LightningModule does: `training_step` calls its parts, and nobody calls it."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.decoder = nn.Linear(3, 2)

    def training_step(self, batch):
        return (self.decoder(self.encoder(batch)) - batch).square().mean()


@pytest.mark.parametrize("line", [
    lambda model: hl.record(model, "**"), lambda model: hl.edit(model, "decoder#1", lambda t: t + 1)
])  # fmt: skip
def test_a_root_never_called_is_said_to_gather_its_batches(line):
    model = Stepped()

    def train():
        for _ in range(3):
            model.training_step(torch.ones(1, 2)).backward()

    with pytest.warns(hl.HooklineWarning) as caught, line(model):
        train()
    (one,) = caught
    text = str(one.message)
    assert "Stepped itself was not called, only modules inside it" in text
    assert "so all their runs are one pass.\nGive the module that is called" in text
    named = re.search(r"model\.get_submodule\('(\w+)'\)", text)
    with hl.record(model.get_submodule(named[1]), "") as run:
        for _ in range(3):
            model.training_step(torch.ones(1, 2))
    assert len(run.passes) == 3


def test_only_modules_that_were_called_are_named():
    model = nn.ModuleDict({"base": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()})})
    with pytest.warns(hl.HooklineWarning) as caught, hl.record(model, ["base.a", "base.b"]):
        for _ in range(2):
            model["base"]["b"](model["base"]["a"](torch.ones(1, 2)))
    text = str(caught[0].message)
    assert "only modules inside it ('base.a', 'base.b')" in text
    assert text.endswith("\nGive the module that is called, or call the model.")


def test_a_root_whose_parts_run_once_is_not_warned_of():
    model = Stepped()
    with hl.record(model) as run, hl.edit(model, "decoder", lambda t: t + 0):
        model.training_step(torch.ones(1, 2))
    assert len(run.passes) == 1
    with hl.edit(model, "decoder", lambda t: t + 0):  # passes do not matter to it
        for _ in range(3):
            model.training_step(torch.ones(1, 2))


class Taken(list):
    """A list that another thread has emptied since the last look at its length."""

    def __len__(self):
        return 1


def test_a_pass_may_be_closed_by_two_threads_at_once():
    current, called = Pass(0), []
    current.at_end = Taken([lambda: called.append("ended")])
    current.call_end_functions()
    assert called == ["ended"]
