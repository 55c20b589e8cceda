"""Values and gradients on real processes, held against torch's own hooks on the plain model."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import hookline as hl
from by_torch import clipped_by_torch, measured, triple, tripled
from distributed_models import gated, half, images, loss_of, mesh, rows, sentences, sharded, stack
from processes import on_ranks
from zoo import conv_net

HERE = Path(__file__).parent
close = partial(assert_close, rtol=1e-4, atol=1e-5)


def unhooked(model):
    return nullcontext([])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Regime(NamedTuple):
    """A way to put a model on two ranks.

    Attributes:
        make: makes the plain model.
        wrap: puts it on the ranks.
        batches: what the ranks run; one batch if all run the same.
        paths: modules, each of which takes a tensor and returns one.
    """

    make: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    batches: Callable[[], list[torch.Tensor]]
    paths: tuple[str, ...]

    def mine(self, rank: int) -> int:
        """The number of this rank's batch."""
        return min(rank, len(self.batches()) - 1)


def halves():
    return [half(images(), rank).requires_grad_() for rank in (0, 1)]


CONV_PATHS = ("stem", "block", "block.0", "fc")
REGIMES = {
    "DDP": Regime(
        conv_net, DistributedDataParallel, halves,
        CONV_PATHS,
    ),
    "FSDP2": Regime(
        conv_net, sharded, halves, CONV_PATHS
    ),
    "tensor parallel": Regime(
        partial(stack, is_split=False), lambda _: stack(is_split=True), lambda: [rows()],
        ("0", "1", "2", "3"),
    ),
    "tensor parallel, shared inputs": Regime(
        partial(gated, is_split=False), lambda _: gated(is_split=True), lambda: [sentences()],
        ("stem", "gate", "up", "down", "head"),
    ),
}  # fmt: skip


@contextmanager
def hand_hooks(model, site, change=None):
    """Hooks of torch's own on one module. Gives the values that came, before `change`."""
    path, _, port = site.partition(":")
    module, came = model.get_submodule(path), []

    def see(value):
        came.append(own(value).detach().clone())
        return None if change is None else change(value)

    def see_first(module, args):
        new = see(args[0])
        return None if new is None else (new, *args[1:])

    handle = {
        "": lambda: module.register_forward_hook(lambda module, args, output: see(output)),
        "input": lambda: module.register_forward_pre_hook(see_first),
        "grad_output": lambda: module.register_forward_hook(
            lambda module, args, output: output.register_hook(see) and None
        ),
        "grad_input": lambda: module.register_forward_pre_hook(
            lambda module, args: args[0].register_hook(see) and None
        ),
    }[port]()
    with handle:
        yield came


def run(model, batch):
    """A run of forward and backward; its output, and what came back to the batch."""
    found = []
    with model.register_forward_hook(lambda module, args, output: found.append(output)):
        loss_of(model, batch).backward()
    return own(found[0]).detach().clone(), [] if batch.grad is None else [batch.grad]


class Ran(NamedTuple):
    """What a run left: this rank's output, the gradients, what hooks or a line saw.

    The gradients are of this rank's batch, if it has one, and the parameters' whole ones.
    """

    output: torch.Tensor
    grads: list[torch.Tensor]
    seen: Any


class Setup(NamedTuple):
    """A regime on this rank: its plain model and its wrapped one."""

    regime: Regime
    rank: int
    plain: nn.Module
    wrapped: nn.Module

    def by_hand(self, hooks) -> Ran:
        """Run the plain model on the batches of all ranks, with hooks made by `hooks(model)`."""
        model, batches = self.plain, self.regime.batches()
        model.zero_grad()
        with hooks(model) as came:
            ran = [run(model, batch) for batch in batches]
        mine = self.regime.mine(self.rank)
        # DDP and FSDP2 take the mean of the ranks' gradients.
        output, of_batch = ran[mine]
        grads = [*of_batch, *(p.grad / len(batches) for p in model.parameters() if p.requires_grad)]
        return Ran(output, grads, came[mine] if came else None)

    def under(self, line) -> Ran:
        """Run the wrapped model on this rank's batch, with a line made by `line(model)`."""
        model = self.wrapped
        model.zero_grad()
        with line(model) as attached:
            output, of_batch = run(model, self.regime.batches()[self.regime.mine(self.rank)])
        grads = [*of_batch, *(whole(p.grad) for p in model.parameters() if p.requires_grad)]
        return Ran(output, grads, attached)

    def part(self, value, like):
        """This rank's part of the plain model's value: all of it, or half of its last dimension."""
        return value if value.shape == like.shape else value.chunk(2, -1)[self.rank]


def in_each_regime(body):
    """A test whose body runs in every process: in each regime, and for each path if it asks so."""

    def all_regimes(rank, folder):
        for name, regime in REGIMES.items():
            setup = Setup(regime, rank, regime.make(), regime.wrap(regime.make()))
            asks = len(signature(body).parameters) > 1
            for given in [(path,) for path in regime.paths] if asks else [()]:
                try:
                    body(setup, *given)
                except BaseException as error:
                    error.add_note(f"under {name}, {given}")
                    raise

    all_regimes.__name__ = body.__name__
    return on_ranks(all_regimes)


def assert_same(found, expected):
    assert_close(found.output, expected.output, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found.grads, expected.grads, strict=True):
        assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def assert_changed(setup, line, hooks, bare):
    """Hold a line against hooks on the plain model, which are to do the same."""
    expected = setup.by_hand(hooks)
    assert_same(setup.under(line), expected)
    # The test could fail: what was done matters.
    assert not all(map(torch.allclose, expected.grads, bare.grads))


def raw(kind, path, hook):
    """What makes a line with one raw hook."""

    def attach(model):
        line = hl.attach(model)
        getattr(line, kind)(path, hook)
        return line

    return attach


def registered(kind, path, hook):
    """What registers that hook with torch's own method."""

    @contextmanager
    def register(model):
        with getattr(model.get_submodule(path), f"register_{kind}_hook")(hook):
            yield []

    return register


@contextmanager
def both_recorded(site, model):
    """Record the values at a site, and statistics of them."""
    with hl.record(model, site) as values, hl.record(model, site, keep=measured) as numbers:
        yield values, numbers


def assert_recorded(setup, site):
    """Hold what is recorded at a site against a hook on the plain model. Return the hook's run."""
    bare = setup.by_hand(lambda model: hand_hooks(model, site))
    ran = setup.under(partial(both_recorded, site))
    values, numbers = ran.seen
    assert_same(ran, bare)
    part = setup.part(bare.seen, values[site])
    assert_close(values[site], part, rtol=1e-4, atol=1e-5)
    assert_close(numbers[site], measured(part), rtol=1e-3, atol=1e-4)
    return bare


@pytest.mark.cell("DDP", "record", "statistics", "features", "edit", "raw hooks")
@pytest.mark.cell("FSDP2", "record", "statistics", "features", "edit", "raw hooks")
@pytest.mark.cell("tensor parallelism", "record", "statistics", "features", "edit", "raw hooks")
@in_each_regime
def test_values_are_those_of_hooks_on_the_plain_model(setup, path):
    for site in (path, f"{path}:input"):
        bare = assert_recorded(setup, site)
        edit = partial(hl.edit, selector=site, change=tripled)
        assert_changed(setup, edit, lambda m, s=site: hand_hooks(m, s, tripled), bare)
    for kind, hook in (
        ("forward", lambda module, args, output: tripled(output)),
        ("forward_pre", lambda module, args: (tripled(args[0]), *args[1:])),
    ):
        assert_changed(setup, raw(kind, path, hook), registered(kind, path, hook), bare)
    scale = partial(hl.edit, selector=path, change=hl.edits.scale(0.3))
    assert_changed(setup, scale, lambda m: hand_hooks(m, path, lambda v: v * 0.3), bare)
    batch = setup.regime.batches()[setup.regime.mine(setup.rank)]
    found = hl.features(setup.wrapped, batch, path, detach=True)[path]
    came = setup.by_hand(lambda model: hand_hooks(model, path)).seen
    assert_close(found, setup.part(came, found), rtol=1e-4, atol=1e-5)


def quartered(grad):
    return clipped_by_torch([grad], norm=grad.norm().item() / 4)[0]


@pytest.mark.cell("DDP", "gradients", "statistics", "edit gradients", "raw hooks", "clip")
@pytest.mark.cell("FSDP2", "gradients", "statistics", "edit gradients", "raw hooks", "clip")
@pytest.mark.cell(
    "tensor parallelism", "gradients", "statistics", "edit gradients", "raw hooks", "clip"
)
@in_each_regime
def test_gradients_are_those_of_hooks_on_the_plain_model(setup, path):
    for site in (f"{path}:grad_output", f"{path}:grad_input"):
        bare = assert_recorded(setup, site)
        edit = partial(hl.edit, selector=site, change=triple)
        assert_changed(setup, edit, lambda m, s=site: hand_hooks(m, s, triple), bare)
        clip = partial(hl.clip, selector=site, norm=bare.seen.norm().item() / 4)
        assert_changed(setup, clip, lambda m, s=site: hand_hooks(m, s, quartered), bare)
    for kind, hook in (
        ("backward_pre", lambda module, given: (triple(given[0]),)),
        ("backward", lambda module, given, _: (triple(given[0]),)),
    ):
        assert_changed(setup, raw(kind, path, hook), registered(f"full_{kind}", path, hook), bare)


def shown(value):
    """What `hl.watch` prints of a tensor on this rank."""
    tensor = own(value.detach())
    mean, std = tensor.double().mean().item(), tensor.double().std(correction=0).item()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype}  mean {mean:.4g}  std {std:.4g}"


@contextmanager
def written_by_hand(model):
    """What hooks of torch's own see of each module, in the words of `hl.watch`, without times."""
    forward, backward, got, handles = [], [], {}, []

    def before(path, module, args, kwargs):
        (given,) = args
        got[path] = list(own(given).shape)

    def after(path, module, args, output):
        label = f"{path or '(root)'} {type(module).__name__}"
        forward.append(f"{label} {got[path]} -> {shown(output)}")
        if output.requires_grad:
            output.register_hook(
                lambda grad: backward.append(f"< {label} grad_output {shown(grad)}")
            )

    for path, module in getattr(model, "module", model).named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(after, path)))
    try:
        yield forward, backward
    finally:
        for handle in handles:
            handle.remove()


def lines_of(text):
    """The lines that were printed, without indentation and times."""
    without = (re.sub(r"  ~?[\d.]+ ms$", "", line).split() for line in text.splitlines())
    return [" ".join(words) for words in without]


def spaced(lines):
    return [" ".join(line.split()) for line in lines]


@pytest.mark.cell("DDP", "watch")
@pytest.mark.cell("FSDP2", "watch")
@pytest.mark.cell("tensor parallelism", "watch")
@in_each_regime
def test_watch_prints_what_hooks_measure_on_this_rank(setup):
    file = io.StringIO()
    with written_by_hand(setup.wrapped) as (forward, backward):
        ran = setup.under(lambda model: hl.watch(model, file=file))
    printed = lines_of(file.getvalue())
    assert [line for line in printed if line[0] != "<"] == spaced(forward)
    assert sorted(line for line in printed if line[0] == "<") == sorted(spaced(backward))
    counts = dict(ran.seen.report().fired)
    assert len(counts) == len(forward) + len(backward)
    assert set(counts.values()) == {1}
    assert_same(ran, setup.by_hand(unhooked))


@contextmanager
def parameter_hook(name, hook, model):
    """torch's own hook on a parameter. It comes before DDP's reduction."""
    with model.get_parameter(name).register_hook(hook):
        yield []


@pytest.mark.cell("DDP", "edit gradients", "raw hooks", "clip")
@pytest.mark.cell("FSDP2", "edit gradients", "raw hooks", "clip")
@pytest.mark.cell("tensor parallelism", "edit gradients", "raw hooks", "clip")
@in_each_regime
def test_parameters_gradients_are_changed_as_by_hand(setup):
    name = next(name for name, p in setup.plain.named_parameters() if p.dim() == 2)
    names = [name for name, _ in setup.plain.named_parameters()]
    bare = setup.by_hand(unhooked)
    n_before = len(bare.grads) - len(names)
    if isinstance(setup.wrapped, FSDPModule):  # its gradients come when they are reduced
        grads = list(bare.grads)
        grads[n_before + names.index(name)] = triple(grads[n_before + names.index(name)])
        expected = bare._replace(grads=grads)
    else:
        expected = setup.by_hand(partial(parameter_hook, name, triple))
    assert_same(setup.under(lambda m: hl.edit(m, f"{name}:grad", triple)), expected)
    assert_same(setup.under(raw("grad", name, triple)), expected)
    bound = bare.grads[-1].norm().item() / 4
    clipped = clipped_by_torch(bare.grads[n_before:], total_norm=bound)
    expected = bare._replace(grads=[*bare.grads[:n_before], *clipped])
    assert_same(setup.under(lambda m: hl.clip(m, total_norm=bound)), expected)
    clipped = [clipped_by_torch([grad], norm=bound)[0] for grad in bare.grads[n_before:]]
    expected = bare._replace(grads=[*bare.grads[:n_before], *clipped])
    assert_same(setup.under(lambda m: hl.clip(m, norm=bound)), expected)


class Rising(nn.Module):
    """Adds to a layer's output what a part makes of it."""

    def __init__(self, *, is_written):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.is_written = nn.Linear(4, 4), is_written
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.part[0].weight.requires_grad_(
            False
        )  # else its gradient would need what is overwritten

    def forward(self, x):
        x = self.stem(x)
        y = self.part(x)
        x = x.add_(y) if self.is_written else x + y
        return x.square()


def part_sharded(model):
    fully_shard(model.part, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def part_split(model):
    return parallelize_module(
        model, mesh(), {"part.0": ColwiseParallel(output_layouts=Replicate())}
    )


@pytest.mark.cell("FSDP2", "gradients", "edit gradients")
@pytest.mark.cell("tensor parallelism", "gradients", "edit gradients")
@on_ranks
def test_the_input_of_a_part_is_the_tensor_that_all_uses_share(rank, folder):
    # A layer returns a view if its input has three dimensions. What comes back past the part to a
    # view that was written to cannot be told, and that is said.
    site = "part.0:grad_input"
    for wrap, shape, is_written in product((part_sharded, part_split), ((3, 4), (2, 3, 4)), (0, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        make = partial(Rising, is_written=is_written)
        regime = Regime(make, wrap, lambda x=x: [x], ())
        setup = Setup(regime, rank, make(), wrap(make()))
        if is_written and len(shape) == 3 and torch.__version__ < (2, 15):
            with pytest.warns(hl.HooklineWarning) as caught:
                setup.under(lambda model: hl.record(model, site))
            assert f"{site} has no gradient: it is a view that was changed" in str(
                caught[0].message
            )
            with pytest.raises(hl.AttachError, match=f"{site} cannot be changed: it is a view"):
                setup.under(lambda model: hl.edit(model, site, triple))
            continue
        bare = assert_recorded(setup, site)
        edit = partial(hl.edit, selector=site, change=triple)
        assert_changed(setup, edit, lambda m: hand_hooks(m, site, triple), bare)


@on_ranks
def test_a_sum_still_to_be_made_is_copied_on_one_rank_alone(rank, folder):
    total = DTensor.from_local(torch.full((2,), 1.0 + rank), mesh(), [Partial()])
    model = nn.Sequential(nn.Identity())
    with hl.record(model, "0") if rank == 0 else nullcontext() as run:
        model(total)
    torch.distributed.barrier()
    if rank == 0:  # were the copy a collective, it would wait for the other rank
        assert run["0"].tolist() == [1.0, 1.0]
    with hl.record(model, "0") as run:
        model(total)
    assert run.full("0").tolist() == [3.0, 3.0]
    assert run["0"].tolist() == [1.0 + rank] * 2
