"""The table of regimes: how people run models, and where in each the verbs are tried.

A new regime is one entry in `REGIMES`. `tests/regimes/test_by_torch.py` goes over them, and
`tests/regimes/table.py` writes them into docs/where-it-works.md.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from by_torch import VALUES, VERBS, Part, nth, results_of
from zoo import (
    ROWS,
    Checkpointed,
    Delegating,
    NotCheckpointed,
    Recursive,
    Tagged,
    data_parallel,
    encoder,
    int8_net,
    lazy_net,
    rows_net,
)

PORTS = ("0:grad_output", "2:grad_input")  # of `rows_net`
ROWS_NET = {"values": ("0", "1"), "gradients": PORTS}  # what is tried in it
NO_MONITOR = ("torch.func.grad, vjp", "torch.func.vmap")  # a monitor measures nothing there


class Regime(NamedTuple):
    """A model, how it is run, and where the verbs are tried.

    Attributes:
        name: that of its row in docs/where-it-works.md.
        make: makes the model; the same one each time.
        step: runs it, forward and backward, and returns what came out.
        variant: tells the entries of one name apart.
        plain: makes the model that torch's hooks are put on.
        plain_step: runs that one, if another step does.
        values: the modules whose outputs are tried; `part` of them, where they are several.
        gradients: the sites of gradients that are tried.
        without_values: verbs that are not tried on values. No gradient flows through a patched
            value, so a patch of the last value with gradients leaves none to run backward.
        without_gradients: verbs that are not tried on gradients.
        untold: verbs that are tried on gradients, of which the docs do not say that they work
            everywhere in the regime.
        tokens: the modules whose outputs are changed at some tokens. Those are dimension 1.
        training: whether check, profile and monitor are tried.
        warning: what each verb on values warns of.
        marks: those of pytest, for every test of it.
    """

    name: str
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module], Any]
    variant: str = ""
    plain: Callable[[], nn.Module] | None = None
    plain_step: Callable[[nn.Module], Any] | None = None
    values: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    part: Part | None = None
    without_values: tuple[str, ...] = ()
    without_gradients: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    training: bool = False
    warning: str = ""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @property
    def by_hand(self) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]:
        """The model that torch's hooks are put on, and its step."""
        return self.plain or self.make, self.plain_step or self.step

    def verbs(self, kind: str) -> tuple[str, ...]:
        """The verbs that are tried: on values, on gradients, or the one that is named."""
        if kind == "values":
            return tuple(verb for verb in VALUES if verb not in self.without_values)
        if kind == "gradients":
            return tuple(verb for verb in VERBS if verb not in self.without_gradients)
        return (kind,)

    def sites(self, kind: str) -> tuple[str, ...]:
        """Where they are tried; one whole model is the site ""."""
        of_kind = {"values": self.values, "gradients": self.gradients, "edit at": self.tokens}
        return of_kind.get(kind, ("",) if self.training else ())


def each(kind: str) -> pytest.MarkDecorator:
    """Give a test each regime and site, of "values", "gradients", "edit at" or a training verb."""
    cases = [
        pytest.param(
            regime, site, marks=regime.marks,
            id="-".join(part for part in (regime.name, regime.variant, site) if part),
        )
        for regime in REGIMES for site in regime.sites(kind)
    ]  # fmt: skip
    return pytest.mark.parametrize(("regime", "site"), cases)


def told(kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names of the regimes that `each` gives, with the verbs that are said to work there."""
    for regime in REGIMES:
        untold = regime.untold if kind == "gradients" else ()
        if regime.sites(kind) and not (kind == "monitor" and regime.name in NO_MONITOR):
            yield regime.name, tuple(verb for verb in regime.verbs(kind) if verb not in untold)


X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
SENTENCES = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A residual block; its parts are functions and modules."""

    def __init__(self):
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.out(self.act(self.fc(x)))


class Net(nn.Module):
    """Two blocks and a head; for `X`."""

    def __init__(self, around=lambda block, x: block(x)):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)
        self.around = around

    def forward(self, x):
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)


class Attending(nn.Module):
    """Uses both outputs of an attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.stem(x)
        out, weights = self.attention(x, x, x)
        return out.sum() + weights.square().sum()


class Switching(nn.Sequential):
    """Runs its first layer without gradients."""

    def forward(self, x):
        with torch.no_grad():
            x = self[0](x)
        with torch.enable_grad():
            return self[3](self[2](self[1](x)))


def step(model, x=ROWS):
    out = model(x)
    out.square().sum().backward()
    return out


def train(model, x=X):
    out = model(x)
    out.float().square().mean().backward()
    return out


def seeded(model):
    torch.manual_seed(0)
    return step(model)


def cast(dtype, model):
    with torch.autocast("cpu", dtype=dtype):
        out = model(ROWS)
        loss = out.square().sum()
    loss.backward()
    return out


def cast_with_backward(model):
    with torch.autocast("cpu", torch.bfloat16):
        return train(model)


def without_gradients(model, x=ROWS, mode=torch.no_grad):
    with mode():
        return model(x)


def slowly(model):
    """Without torch's fast path of encoder layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return without_gradients(model, SENTENCES)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def of_input(model, rows=ROWS):
    x = rows.clone().requires_grad_()
    model(x).square().sum().backward()
    return x.grad


def through_int8(model):
    x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
    return step(model, x), x.grad


def loss_of(model):
    return lambda x: model(x).square().sum()


def of_weights(model):
    def loss(weights):
        return functional_call(model, weights, (X,)).square().mean()

    return list(grad(loss)(dict(model.named_parameters())).values())


def compiled(model):
    torch._dynamo.reset()
    return train(torch.compile(model, backend="aot_eager"))


def in_a_thread(model):
    others = []
    other = threading.Thread(target=lambda: others.extend(results_of(copy.deepcopy(model), train)))
    other.start()
    mine = train(model)
    other.join()
    return [mine, *others]


def replaced():
    model = rows_net()
    own = model[0].forward
    model[0].forward = lambda x: own(x) * 2
    return model


def replaced_for_a_step(model):
    own = model.blocks[0].forward
    model.blocks[0].forward = lambda x: own(x) * 2
    try:
        return train(model)
    finally:
        del model.blocks[0].forward


def silent():
    """Without what backward leaves in the parameters: transforms leave nothing there."""
    return rows_net().requires_grad_(False)


def checkpointed(is_reentrant):
    model = Checkpointed(*rows_net())
    model.is_reentrant = is_reentrant
    return model


def net_of_checkpoints(is_reentrant):
    return Net(lambda block, x: checkpoint(block, x, use_reentrant=is_reentrant))


def recursive():
    torch.manual_seed(0)
    return Recursive(4)


def switching():
    return Switching(*rows_net(), nn.Linear(3, 2))


FAST_PATH = "TransformerEncoder, torch's fast path"
LAYERS = ("layers.0", "layers.0.linear1", "layers.1.norm2")
LAYER_PORTS = (
    "layers.0:grad_output", "layers.1.linear2:grad_input", "layers.1.linear1:grad_output",
)  # fmt: skip
IN_NET = ("blocks.0.act", "blocks.1")
PRUNED = "pruning; old `weight_norm` and `spectral_norm`"
OLD_WEIGHT_NORM = pytest.mark.filterwarnings("ignore:.*weight_norm` is deprecated")
QUANTIZATION = (
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel"),
)

REGIMES = [
    Regime("autocast", rows_net, partial(cast, torch.bfloat16), "bfloat16",
           values=("0", "1"), gradients=PORTS),
    Regime("autocast", rows_net, partial(cast, torch.float16), "float16", values=("0", "1")),
    *(Regime("autocast", rows_net, partial(cast, dtype), f"the root, {dtype}", values=("",),
             without_values=("patch",)) for dtype in (torch.bfloat16, torch.float16)),
    Regime("autocast", Net, cast_with_backward, "backward, too", tokens=IN_NET, training=True),
    *(Regime("activation checkpointing", partial(checkpointed, is_reentrant), step, variant,
             plain=lambda: NotCheckpointed(*rows_net()), values=("0", "1"),
             without_values=("patch",) if is_reentrant else (),
             gradients=("0:grad_output", "1:grad_output", "1:grad_input", "2:grad_input"))
      for is_reentrant, variant in ((True, "reentrant"), (False, "not reentrant"))),
    Regime("activation checkpointing", partial(net_of_checkpoints, False), train,
           "not reentrant, each block", tokens=IN_NET, training=True),
    Regime("activation checkpointing", partial(net_of_checkpoints, True),
           lambda model: train(model, X.clone().requires_grad_()), "reentrant, each block",
           tokens=IN_NET, training=True),
    Regime("torch.compile", Net, compiled, tokens=IN_NET, training=True,
           marks=(pytest.mark.compiles,)),
    *(Regime("no_grad, inference_mode", rows_net, partial(without_gradients, mode=mode),
             mode.__name__, values=("0", "1")) for mode in (torch.no_grad, torch.inference_mode)),
    Regime("no_grad, inference_mode", Net, partial(without_gradients, x=X), tokens=IN_NET,
           training=True),
    Regime("`no_grad` or `enable_grad` inside forward", switching, step, values=("0", "1"),
           gradients=("2:grad_output", "3:grad_input"), untold=("clip",)),
    Regime("DataParallel", lambda: data_parallel(rows_net()), step, plain=rows_net, **ROWS_NET),

    Regime("TransformerEncoder, with gradients", encoder, partial(step, x=SENTENCES), "training",
           values=LAYERS[:2], gradients=LAYER_PORTS, tokens=LAYERS, training=True),
    Regime("TransformerEncoder, with gradients", encoder, partial(step, x=SENTENCES),
           "the last", values=LAYERS[2:], without_values=("patch",)),
    Regime("TransformerEncoder, with gradients", lambda: encoder().eval(),
           partial(step, x=SENTENCES), "evaluating", gradients=LAYER_PORTS),
    Regime(f"{FAST_PATH} on", lambda: encoder().eval(), partial(without_gradients, x=SENTENCES),
           plain_step=slowly, values=LAYERS, without_values=("features",), warning="fast path"),
    Regime(f"{FAST_PATH} off", lambda: encoder().eval(), slowly, values=LAYERS),
    *(Regime("MultiheadAttention", Attending, partial(step, x=ROWS[None]), f"part {k}", part=nth(k),
             values=("attention",), without_values=("watch",),
             gradients=(f"attention:grad_output[{k}]",), without_gradients=("raw hooks",))
      for k in (0, 1)),

    Regime("lazy modules, before their first run", lazy_net, seeded, **ROWS_NET,
           untold=("clip",), training=True),
    *(Regime("parametrized weights", partial(rows_net, change), step, change.__name__,
             values=("0", "0.parametrizations.weight"), gradients=PORTS, training=True)
      for change in (parametrizations.weight_norm, parametrizations.orthogonal,
                     parametrizations.spectral_norm)),
    *(Regime(PRUNED, partial(rows_net, change), step, variant, values=("0",), gradients=PORTS,
             marks=(OLD_WEIGHT_NORM,))
      for variant, change in (
          ("prune", partial(prune.l1_unstructured, name="weight", amount=0.5)),
          ("weight_norm", nn.utils.weight_norm), ("spectral_norm", nn.utils.spectral_norm))),
    Regime("AveragedModel (EMA, SWA)", lambda: AveragedModel(rows_net()), step, plain=rows_net,
           **ROWS_NET),
    Regime("AveragedModel (EMA, SWA)", lambda: AveragedModel(Net()), train,
           plain=Net, tokens=IN_NET, training=True),
    Regime("a forward replaced on the instance", replaced, step, **ROWS_NET),
    Regime("a forward replaced on the instance", Net, replaced_for_a_step, tokens=IN_NET,
           training=True),
    Regime("modules that call themselves recursively", recursive, step, values=("linear", ""),
           without_values=("features", "patch"), gradients=("linear:grad_output",),
           without_gradients=("gradients", "clip"), training=True),
    Regime("modules with their own `__getattr__`, `__setattr__`", lambda: Delegating(rows_net()),
           step, values=("inner.0",), gradients=("inner.0:grad_output", "inner.2:grad_input")),
    Regime("modules with their own `__getattr__`, `__setattr__`", lambda: Delegating(rows_net()),
           step, "the last", values=("inner",), without_values=("patch",)),
    Regime("modules with their own `__getattr__`, `__setattr__`",
           lambda: Delegating(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 2))),
           lambda model: train(model, X.clone()), training=True),

    Regime("tensor subclasses", rows_net, lambda model: step(model, ROWS.as_subclass(Tagged)),
           **ROWS_NET),
    Regime("torchao, int8 weights", cache(int8_net), through_int8, **ROWS_NET),
    Regime("dynamically quantised",
           lambda: quantize_dynamic(rows_net(), {nn.Linear}, dtype=torch.qint8),
           lambda model: model(ROWS), values=("0", "1"), marks=QUANTIZATION),

    Regime("torch.func.grad, vjp", silent, lambda model: grad(loss_of(model))(ROWS),
           plain_step=of_input, without_values=("patch",), **ROWS_NET),
    Regime("torch.func.grad, vjp", Net, of_weights, training=True),
    Regime("torch.func.vmap", rows_net, lambda model: vmap(model)(ROWS), "values",
           plain_step=lambda model: model(ROWS), values=("0", "1"),
           without_values=("statistics", "features", "patch")),
    Regime("torch.func.vmap", silent, lambda model: vmap(grad(loss_of(model)))(ROWS), "gradients",
           plain_step=lambda model: torch.stack([of_input(model, row) for row in ROWS]),
           gradients=PORTS, without_gradients=("gradients", "raw hooks")),
    Regime("torch.func.vmap", Net, lambda model: vmap(model)(X), training=True),
    Regime("torch.fx.GraphModule", lambda: torch.fx.symbolic_trace(rows_net()), step, **ROWS_NET),
    Regime("torch.fx.GraphModule", lambda: torch.fx.symbolic_trace(Net()), train,
           tokens=("blocks.0.act",), training=True),

    Regime("several threads that share a model", Net, in_a_thread, training=True),
]  # fmt: skip
