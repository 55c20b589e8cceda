"""In each regime the verbs do by numbers what torch's own hooks do, and change no bit themselves.

The regimes are entries of tests/regime_cases.py. What has a shape of its own is a test of its own.
"""

from __future__ import annotations

import contextvars
import copy
import io
import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.utils import prune
from torch.testing import assert_close

import hookline as hl
from by_torch import (
    VALUES,
    WHOLE,
    assert_gradients_are_torchs,
    assert_printed,
    assert_values_are_torchs,
    clipped_by_torch,
    hooked_by_torch,
    measured,
    raw_hook,
    results_of,
    seen_by_torch,
    triple,
    tripled,
)
from forked_children import child
from regime_cases import NO_MONITOR, PORTS, each, loss_of, of_input, recursive, silent, step
from zoo import ROWS, BlockInRegion, Delegating, rows_net

both_ports = pytest.mark.parametrize("site", PORTS)


def warned_of(text):
    return pytest.warns(hl.HooklineWarning, match=text) if text else nullcontext()


@pytest.mark.slow
@each("values")
def test_values_are_those_of_torchs_hooks(regime, site):
    verbs = regime.verbs("values")
    for tried in [[verb] for verb in verbs] if regime.warning else [verbs]:
        with warned_of(regime.warning):
            assert_values_are_torchs(
                regime.make, regime.step, site, tried,
                part=regime.part or WHOLE, plain=regime.by_hand,
            )  # fmt: skip


@each("edit at")
def test_an_edit_at_tokens_is_that_of_torchs_hooks(regime, site):
    def at_two(value):
        changed = value.clone()
        changed[:, [0, -1]] = tripled(value[:, [0, -1]])
        return changed

    make, run = regime.by_hand
    torch.manual_seed(0)
    model = make()
    bare = results_of(model, run)
    with seen_by_torch(model, site, change=at_two):
        expected = results_of(model, run)
    assert not all(map(torch.equal, expected, bare))
    torch.manual_seed(0)
    model = regime.make()
    with hl.edit(model, site, tripled, at=[0, -1]):
        assert_close(results_of(model, regime.step), expected)


@pytest.mark.cell(
    "torch.compile", "edit at",
    note="`steps=` raises an `AttachError`, because compiled code cannot tell the step.",
)  # fmt: skip
@pytest.mark.compiles
def test_steps_in_compiled_code_are_refused():
    torch.compiler.reset()
    model = rows_net()
    run = torch.compile(model, backend="eager", fullgraph=True)
    with hl.edit(model, "1", tripled, steps=0), pytest.raises(Exception, match="steps= at 1 in"):
        run(ROWS)


@pytest.mark.slow
@each("gradients")
def test_gradients_are_those_of_torchs_hooks(regime, site):
    assert_gradients_are_torchs(
        regime.make, regime.step, site, regime.verbs("gradients"),
        part=regime.part, plain=regime.by_hand,
    )  # fmt: skip


def made(regime):
    """The model, before a step with random numbers of its own."""
    torch.manual_seed(0)
    model = regime.make()
    torch.manual_seed(2)
    return model


def unchanged(regime, verb):
    """Run under a verb, compare all numbers with those of a bare run, and return what it gave."""
    expected = results_of(made(regime), regime.step)
    model = made(regime)
    with verb(model) as given:
        found = results_of(model, regime.step)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return given


@each("check")
def test_check_changes_no_bit_and_finds_nothing(regime, site):
    assert unchanged(regime, hl.check).findings == []


@pytest.mark.slow
@each("profile")
def test_profile_changes_no_bit_and_times_each_module_that_ran(regime, site):
    prof = unchanged(regime, hl.profile)
    assert prof.total.passes >= 1
    assert prof.total.time.all > 0
    assert any(row.calls for row in prof.rows)


@each("monitor")
def test_monitor_changes_no_bit_and_measures_what_is_recorded(regime, site):
    seen = unchanged(regime, partial(hl.monitor, ports="output"))
    model = made(regime)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a recording: what it could not see
        with hl.record(model, copy=True) as recorded:
            regime.step(model)
    n_measured = 0
    for place in seen.sites:
        values = [value for one in recorded.passes for value in one.calls(place)]
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            continue
        whole = torch.cat([value.detach().double().flatten() for value in values])
        mean = seen[place].mean[-1]
        assert math.isclose(mean, whole.mean(), rel_tol=1e-5, abs_tol=1e-6), place
        n_measured += 1
    assert n_measured >= 1 or regime.name in NO_MONITOR


@pytest.fixture(params=[False, True], ids=["compiled", "compiled, checkpointed"])
def compiled_block(request):
    """A model, a step of its compiled self, and what makes the same in eager mode."""
    torch.compiler.reset()
    model = BlockInRegion(is_checkpointed=request.param)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = BlockInRegion(is_checkpointed=False)
    yield model, lambda _: step(run), (lambda: plain, step)
    torch.compiler.reset()


@pytest.mark.cell(
    "torch.compile", "record", "statistics", "edit", "raw hooks", "features", "watch"
)  # fmt: skip
@pytest.mark.cell(
    "activation checkpointing in compiled code",
    "record", "statistics", "edit", "raw hooks", "features", "watch",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
def test_values_in_compiled_code(compiled_block):
    model, run, plain = compiled_block
    verbs = [verb for verb in VALUES if verb != "patch"]
    assert_values_are_torchs(lambda: model, run, "block.linear", verbs, plain=plain)


@pytest.mark.cell("torch.compile", "patch")
@pytest.mark.cell("activation checkpointing in compiled code", "patch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
def test_patches_in_compiled_code(compiled_block):  # alone: each verb is a recompilation
    model, run, plain = compiled_block
    assert_values_are_torchs(lambda: model, run, "block.linear", ["patch"], plain=plain)


@pytest.mark.cell("torch.compile", "gradients", "edit gradients", "clip")
@pytest.mark.cell(
    "activation checkpointing in compiled code", "gradients", "edit gradients", "clip"
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("site", ["block:grad_input", "block.linear:grad_output"])
@pytest.mark.compiles
def test_gradients_in_compiled_code(site, compiled_block):
    model, run, plain = compiled_block
    verbs = ["gradients", "edit gradients", "clip"]
    assert_gradients_are_torchs(lambda: model, run, site, verbs, plain=plain)


@pytest.mark.cell("torch.func.vmap", "features")
@pytest.mark.parametrize("path", ["0", "1"])
def test_features_of_each_example_under_vmap(path):
    model = rows_net()
    with seen_by_torch(model, path) as came:
        model(ROWS)
    found = vmap(lambda row: hl.features(model, row, path)[path])(ROWS)
    assert_close(found, came[0])


@pytest.mark.cell("torch.func.vmap", "gradients", "statistics")
@both_ports
def test_gradients_of_each_example_under_vmap_are_recorded(site):
    model, plain = silent(), silent()
    with hooked_by_torch(plain, site) as came:
        for row in ROWS:
            of_input(plain, row)
    with hl.record(model, site) as run, hl.record(model, site, keep=torch.norm) as norms:
        vmap(grad(loss_of(model)))(ROWS)
    assert_close(run[site], torch.stack(came))
    assert_close(norms[site], torch.stack([one.norm() for one in came]))


@pytest.mark.cell("torch.func.grad, vjp", "edit")
def test_an_edit_under_functional_call():
    model = rows_net()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return functional_call(model, weights, (ROWS,)).square().sum()

    with seen_by_torch(model, "1", change=tripled):
        step(model)
    expected = {name: p.grad for name, p in model.named_parameters()}
    with hl.edit(model, "1", tripled):
        found = grad(loss)(weights)
    assert_close(found, expected)
    assert not torch.equal(found["0.weight"], grad(loss)(weights)["0.weight"])


@pytest.mark.cell("modules that call themselves recursively", "gradients")
def test_gradients_of_recursive_calls_are_in_the_order_of_calls():
    site, model, plain = "linear:grad_output", recursive(), recursive()
    with hooked_by_torch(plain, site) as came:
        step(plain)
    with hl.record(model, site) as run:
        step(model)
    assert len(came) == 3
    assert_close(run.calls(site), came[::-1])  # what is called last has its gradient first


def pruned():
    return rows_net(partial(prune.l1_unstructured, name="weight", amount=0.5))


@pytest.mark.cell("pruning; old `weight_norm` and `spectral_norm`", "clip")
@pytest.mark.cell("modules with their own `__getattr__`, `__setattr__`", "clip")
@pytest.mark.parametrize(
    ("make", "bound"),
    [(pruned, {"norm": 0.1}), (lambda: Delegating(rows_net()), {"total_norm": 0.1})],
    ids=["pruned", "delegating"],
)
def test_gradients_of_parameters_are_clipped_as_torch_does(make, bound):
    model, plain = make(), make()
    step(plain)
    with hl.clip(model, **bound):
        step(model)
    bare = [p.grad for p in plain.parameters()]
    assert_close([p.grad for p in model.parameters()], clipped_by_torch(bare, **bound))


def in_threads(*actions):
    """What each action returns in a thread of its own, the last of twenty times."""
    barrier = threading.Barrier(len(actions), timeout=60)

    def work(action):
        barrier.wait()
        for _ in range(20):
            found = action()
        return found

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(work, actions))


@pytest.mark.cell(
    "several threads that share a model", "record", "statistics", "edit", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_values_in_threads_that_share_a_model(path):
    model = rows_net()
    with torch.no_grad():
        with seen_by_torch(model, path) as came:
            bare = model(ROWS)
        with seen_by_torch(model, path, change=tripled):
            expected = model(ROWS)

    def run(line):
        with torch.no_grad(), line as attached:
            return model(ROWS), attached

    def watched():
        file = io.StringIO()
        run(hl.watch(model, path, file=file))
        return file.getvalue()

    found = in_threads(
        lambda: run(hl.edit(model, path, tripled))[0],
        lambda: run(hl.record(model, path)),
        lambda: run(hl.record(model, path, keep=measured)),
        lambda: hl.features(model, ROWS, path)[path],
        watched,
    )
    assert_close(found[0], expected)
    for out, attached in found[1:3]:
        assert torch.equal(out, bare)
        assert_close(attached[path], came[0] if attached is found[1][1] else measured(came[0]))
    assert_close(found[3], came[0])
    assert_printed(found[4], came)
    assert not torch.equal(expected, bare)


def lines_of_gradients(model, site, came):
    """Change and clip a gradient: what a hook by hand does, and what attaches a line for it."""
    bound = came[0].norm().item() / 4

    def raw():
        line = hl.attach(model)
        raw_hook(line, site)
        return line

    return [
        (triple, lambda: hl.edit(model, site, triple)), (triple, raw),
        (lambda grad: clipped_by_torch([grad], norm=bound)[0],
         lambda: hl.clip(model, site, norm=bound)),
    ]  # fmt: skip


@pytest.mark.cell(
    "several threads that share a model", "gradients", "edit gradients", "raw hooks", "clip"
)
@both_ports
def test_gradients_in_threads_that_share_a_model(site):
    model = silent()
    with hooked_by_torch(model, site) as came:
        bare = of_input(model)
    lines = [*lines_of_gradients(model, site, came), (None, lambda: hl.record(model, site))]
    expected = []
    for change, _ in lines:
        with hooked_by_torch(model, site, change):
            expected.append(of_input(model))

    def run(attached):
        with attached() as line:
            return of_input(model), line

    found = in_threads(*(partial(run, attached) for _, attached in lines))
    assert_close([grad for grad, _ in found], expected)
    assert_close(found[3][1][site], came[0])
    assert not torch.equal(expected[0], bare)


@pytest.mark.cell("async tasks", "record", "edit")
def test_in_contexts_of_their_own():
    model = rows_net()
    with seen_by_torch(model, "1") as came:
        bare = model(ROWS)
    with seen_by_torch(model, "1", change=tripled):
        expected = model(ROWS)
    context = contextvars.copy_context()
    run, edit = hl.record(model, "1"), context.run(hl.edit, model, "1", tripled)
    context.run(edit.__enter__)
    recording = run.__enter__()
    assert torch.equal(model(ROWS), bare)
    assert_close(context.run(model, ROWS), expected)
    run.remove()
    context.run(edit.remove)
    assert torch.equal(recording["1"], came[0])


@pytest.mark.cell("`os.fork` while hooks are attached", "record", "edit", "features", "watch")
@pytest.mark.processes
def test_values_in_a_forked_child():
    model = rows_net().requires_grad_(False)
    with seen_by_torch(model, "1") as came, seen_by_torch(model, "0") as first:
        bare = model(ROWS)
    with seen_by_torch(model, "1", change=tripled):
        expected = model(ROWS)
    file = io.StringIO()
    with hl.edit(model, "1", tripled) as edit, hl.watch(model, "0", file=file):

        def action():
            edited = model(ROWS)
            edit.remove()
            features = hl.features(model, ROWS, "1")["1"]
            return edited.tolist(), features.tolist(), file.getvalue()

        edited, features, text = child(action)
        assert_close(torch.tensor(edited), expected)
        assert_close(torch.tensor(features), came[0])
        assert_printed(text, first * 2)
        assert file.getvalue() == ""
        assert_close(model(ROWS), expected)
    assert_printed(file.getvalue(), first)
    assert not torch.equal(expected, bare)


@pytest.mark.cell(
    "`os.fork` while hooks are attached", "gradients", "edit gradients", "raw hooks", "clip"
)
@both_ports
@pytest.mark.processes
def test_gradients_in_a_forked_child(site):
    model = rows_net()
    with hooked_by_torch(model, site) as came:
        bare = results_of(model, step)
    with hl.record(model, site) as run:

        def action():
            step(model)
            return run[site].tolist()

        assert_close(torch.tensor(child(action)), came[0])
        assert not run.passes  # nothing of it comes back
        step(model)
    assert_close(run[site], came[0])
    for change, attached in lines_of_gradients(model, site, came):
        by_hand = copy.deepcopy(model)
        with hooked_by_torch(by_hand, site, change):
            expected = results_of(by_hand, step)
        with attached():
            answer = child(lambda: [value.tolist() for value in results_of(model, step)])
            step(model)
        found = [*map(torch.tensor, answer)]
        assert_close(found, expected)
        assert not all(map(torch.equal, found, bare))
