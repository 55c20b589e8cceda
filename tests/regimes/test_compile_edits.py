"""torch.compile: every ready-made edit, of values and of gradients, inside the graph."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl
from thoroughness import tries

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EDITS = {
    "scale": lambda k: hl.edits.scale(k / 4),
    "scale by a tensor": lambda k: hl.edits.scale(torch.tensor(k / 4)),
    "add": lambda k: hl.edits.add(k / 4),
    "replace": lambda k: hl.edits.replace(k / 4),
    "replace by a tensor": lambda k: hl.edits.replace(torch.full((4, 8), k / 4)),
    "clamp": lambda k: hl.edits.clamp(max=0.25),
}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def step(model, run, site, change):
    """What the model gives under an edit, and its parameters' gradients."""
    model.zero_grad()
    with hl.edit(model, site, change):
        out = run(X)
        out.sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [out.detach(), *(grad.clone() for grad in grads)]


@pytest.mark.cell("torch.compile", "edit", "edit gradients")
@pytest.mark.parametrize("site", ["0", "2:input", "0:grad_output", "2:grad_input"])
@pytest.mark.parametrize("name", EDITS)
def test_a_sweep_of_each_ready_made_edit_is_right_and_one_graph(name, site):
    model = make()
    graphs = CompileCounterWithBackend("aot_eager" if "grad" in site else "eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for k in range(1, 10):
        expected = step(model, model, site, EDITS[name](k))
        torch.testing.assert_close(step(model, compiled, site, EDITS[name](k)), expected)
    assert graphs.frame_count <= 2  # a shape is taken for dynamic once, perhaps


class Branches(nn.Module):
    """What the caller gave and what a layer made, each read by a second branch as well."""

    def __init__(self):
        super().__init__()
        self.given, self.made, self.last = nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.made(x)
        return self.given(x) + self.last(hidden) + hidden


def zeroed(value):
    return value.zero_()


def a_column(value):
    value[:, 0] = 0


@pytest.mark.parametrize("site", ["given", "made", "last:input", "made:grad_output"])
@pytest.mark.parametrize(
    ("backend", "fullgraph"), [("aot_eager", True), ("aot_eager", False), ("inductor", True)]
)
def test_an_edit_that_writes_in_place_is_refused_as_in_eager(site, backend, fullgraph):
    model, x = Branches(), X.clone()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    kind = torch._dynamo.exc.Unsupported if fullgraph else hl.StructureError
    for write in (zeroed, a_column):
        with hl.edit(model, site, write), pytest.raises(kind, match=r"(wrote|gradient) in place"):
            compiled(x).sum().backward()
        assert torch.equal(x, X)


@pytest.mark.parametrize("is_dynamic", [None, True])
def test_edits_of_batches_of_any_size_are_one_dynamic_graph(is_dynamic):
    model, graphs = make(), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=is_dynamic)
    for n in (3, 5, 7, 4):
        with hl.edit(model, ["0", "2:input"], lambda value: value * 2 + 1):
            found = compiled(torch.ones(n, 8))
            torch.testing.assert_close(found, model(torch.ones(n, 8)))
        assert not torch.equal(found, model(torch.ones(n, 8)))
    assert graphs.frame_count == (1 if is_dynamic else 2)


@pytest.mark.parametrize("change", [lambda value: value[:, :2], lambda value: (value, value)])
def test_an_edit_to_another_shape_says_so_in_a_dynamic_graph_too(change):
    model = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with hl.edit(model, "0", change), pytest.raises(Exception, match=r"expected Tensor\[4, 8\]"):
        compiled(X)


CLIPS = {
    "norm": lambda k: {"norm": k / 64},
    "largest element": lambda k: {"norm": k / 64, "norm_type": float("inf")},
    "value": lambda k: {"value": k / 64},
}
CLIPPED = ["0:grad_output", "2:grad_input", ":grad_output"]


@pytest.mark.cell("torch.compile", "clip")
@pytest.mark.parametrize(
    ("name", "site", "backend"),
    tries(
        [*itertools.product(CLIPS, CLIPPED, ["aot_eager", "eager"])],
        gate=[*((*pair, "aot_eager") for pair in zip(CLIPS, CLIPPED, strict=True)),
              *((name, "0:grad_output", "eager") for name in CLIPS)],
    ),
)  # fmt: skip
def test_clipping_is_as_in_eager_a_sweep_of_bounds_one_graph(name, site, backend):
    model, graphs = make(), CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for k in (*range(1, 10), 1e6):
        found = []
        for run in (model, compiled):
            model.zero_grad()
            with hl.clip(model, site, **CLIPS[name](k)) as line:
                (run(X) * torch.linspace(-1, 1, 2)).sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
            found.append([(row.seen, row.clipped) for row in line.report()])
            found.append([(row.largest, row.factor) for row in line.report()])
        torch.testing.assert_close(found[3:], found[:3])
        assert found[1] == [(1, int(k < 10))]
    assert graphs.frame_count <= 2


def test_a_compiled_clip_that_ended_before_backward_is_an_error():
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        pytest.warns(hl.HooklineWarning, match="never fired"),
        hl.clip(model, "0:grad_output", norm=0.1),
    ):
        loss = compiled(X).sum()
    with pytest.raises(hl.AttachError, match="the compiled code would change it all the same"):
        loss.backward()


def test_what_of_gradients_no_graph_can_hold_is_named():
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.edit(model, "0:grad_output", lambda grad: grad if grad.sum() > 0 else -grad) as line:
        line.options.quiet = True
        with pytest.raises(Exception, match="graph") as caught:
            compiled(X).sum().backward()
    (note,) = [note for note in caught.value.__notes__ if note.startswith("hookline: the gradient")]
    assert "at 0:grad_output (Linear)" in note
    assert "force_eager" in note


@pytest.mark.parametrize("site", ["0:grad_output", "2:grad_input"])
@pytest.mark.parametrize("is_recorded_first", [False, True])
def test_a_gradient_is_recorded_as_it_was_changed_or_neither(site, is_recorded_first):
    model = make()
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        record, edit = hl.record(model, site), hl.edit(model, site, hl.edits.scale(3.0))
        first, second = (record, edit) if is_recorded_first else (edit, record)
        with first, second:
            run(X).sum().backward()
        found.append(record.recording[site])
    eager, compiled = (one if torch.is_tensor(one) else one["input"] for one in found)
    torch.testing.assert_close(compiled, eager)


def test_an_error_of_the_models_own_is_not_blamed_on_a_hook():
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.record(model, "0"):
        compiled(X)
        with pytest.raises(Exception, match="reduction dim") as caught:
            compiled(X[:, :5])
    assert not any("cannot be part" in note for note in getattr(caught.value, "__notes__", []))
