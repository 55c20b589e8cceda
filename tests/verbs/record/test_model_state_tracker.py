"""State that a model keeps from batch to batch: it is said, and no early stop changes the rows."""

from __future__ import annotations

import types
import warnings
from collections import deque

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.record.model_state_tracker import ModelStateTracker, may_keep_state

ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


class Slotted:
    __slots__ = ("value",)


class Recurrent(nn.Module):
    """Its state is updated behind the module `first`."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.way, self.calls = way, 0
        self.past = deque([torch.zeros(6)])
        self.register_buffer("h", torch.zeros(6))
        self.plain = None
        self.slotted, self.named = Slotted(), types.SimpleNamespace(value=torch.zeros(6))
        self.slotted.value = torch.zeros(6)

    def forward(self, x):
        memory = {
            "count": self.calls, "queue": self.past[-1], "slot": self.slotted.value,
            "object": self.named.value,
        }.get(self.way, self.h)  # fmt: skip
        if self.way == "attribute":
            memory = torch.zeros(6) if self.plain is None else self.plain
        z = self.last(self.first(x + memory))
        new = z.mean(0)
        if self.way == "in place":
            self.h.copy_(new)
        elif self.way == "data":
            self.h.data.copy_(new)  # raises no version
        elif self.way == "assigned":
            self.h = new
        elif self.way == "attribute":
            self.plain = new
        elif self.way == "queue":
            self.past.append(new)
        elif self.way == "slot":
            self.slotted.value = new
        elif self.way == "object":
            self.named.value = new
        elif self.way == "count":
            self.calls += 1
        return z


def by_plain_forwards(model, site):
    rows = []
    hook = model.get_submodule(site).register_forward_hook(lambda _, __, out: rows.append(out))
    with torch.no_grad():
        for batch in ROWS.split(4):
            model(batch)
    hook.remove()
    return torch.cat(rows)


WAYS = {
    "in place": "h", "data": "h", "assigned": "h", "attribute": "plain", "queue": r"past\[",
    "count": "calls", "slot": "slotted.value", "object": "named.value",
}  # fmt: skip


@pytest.mark.parametrize("site", ["first", ""])
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_plain_forwards_and_it_is_said(tmp_path, way, site):
    expected = by_plain_forwards(Recurrent(way).eval(), site)
    with pytest.warns(hl.HooklineWarning) as told:
        store = hl.extract(Recurrent(way), ROWS, site, tmp_path / "s", batch_size=4)
    assert torch.equal(store[site][:], expected)
    (warning,) = told
    first, second = str(warning.message).splitlines()
    assert WAYS[way].removesuffix(r"\[") in first
    assert first.endswith(
        "changed while the model ran: rows may depend on the batches before them."
    )
    assert (
        second == "Extract in one process, without an interruption, or reset it before each batch."
    )


def counting(model, calls):
    model.register_forward_hook(lambda *_: calls.append(1))
    return model


class Caches(nn.Module):
    """What it keeps is made once, and then the same for each batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Identity()
        self.register_buffer("mask", None)
        self.table = {}

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.tril(torch.ones(6, 6))
        self.table["scale"] = torch.ones(6)  # another tensor of the same values
        return self.last(self.first(x) @ self.mask * self.table["scale"])


def test_a_cache_that_is_made_once_is_no_state(tmp_path):
    model, calls = Caches(), []
    counting(model.last, calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hl.extract(model, ROWS, "first", tmp_path / "s", batch_size=4)
    assert len(calls) == 2  # it settles in the second batch


def test_a_model_without_state_stops_from_the_second_batch_on(tmp_path):
    model, calls = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Identity()), []
    counting(model[2], calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hl.extract(model, ROWS, "0", tmp_path / "s", batch_size=4)
    assert len(calls) == 1


def test_batch_norm_that_trains_has_its_own_remedy(tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))
    with pytest.warns(
        hl.HooklineWarning, match=r"0\.running_mean, .*\nExtract again without eval="
    ):
        hl.extract(model, ROWS, "1", tmp_path / "s", batch_size=4, eval=False)


def test_a_resumed_extraction_looks_for_state_too(tmp_path):
    def run():
        with pytest.warns(hl.HooklineWarning, match="h changed while the model ran"):
            hl.extract(
                Recurrent("assigned"), ROWS, "first", tmp_path / "s", batch_size=4, shard_bytes=1
            )

    run()
    (tmp_path / "s" / "shard-00000003.safetensors").unlink()
    run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.weight.detach().add_(1),
        lambda model: model.register_parameter("weight", nn.Parameter(torch.zeros(2, 2))),
        lambda model: setattr(model, "large", torch.zeros(2**19)),
        lambda model: model.large.add_(1),
        lambda model: setattr(model, "number", float("inf")),
        lambda model: delattr(model, "number"),
        lambda model: model.nested["a"][0].append(3),
        lambda model: setattr(model, "number", 2),
        lambda model: setattr(model.other, "x", 1),  # also held by model.same
        lambda model: setattr(model.other.itself, "x", [2]),
        lambda model: model.other.parts["a"].append(3),
    ],
)
def test_what_changes_is_named_once(change):
    model = nn.Linear(2, 2)
    model.large = torch.zeros(2**19)
    model.number, model.nested = float("nan"), {"a": ([1, 2], torch.ones(2))}
    model.other = model.same = type("Own", (), {})()
    model.other.itself, model.other.parts = model.other, {"a": [1]}
    state = ModelStateTracker(model)
    assert state.changed_names() == []
    change(model)
    assert len(state.changed_names()) == 1
    assert state.changed_names() == []


class Unreadable(dict):
    def items(self):
        raise KeyboardInterrupt


def test_an_interrupt_while_the_state_is_read_leaves_no_hooks(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].table = Unreadable()
    with pytest.raises(KeyboardInterrupt) as caught:
        hl.extract(model, torch.ones(4, 2), "0", tmp_path / "store", batch_size=2, progress=False)
    assert caught.value is not None  # its traceback holds the frames of the call
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("training", [False, True])
def test_a_container_in_training_mode_keeps_no_state(training):
    model = nn.Sequential(nn.BatchNorm1d(6)).train()
    model[0].train(training)
    assert may_keep_state(model) == training


def test_a_tensor_of_another_form_has_changed():
    model = Recurrent("in place")
    state = ModelStateTracker(model)
    for other in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32)):
        model.h = other  # of the same bytes
        assert state.changed_names() == ["h"]
        assert state.changed_names() == []


COMPLEX = torch.tensor([1 + 2j, 3 - 1j])


@pytest.mark.parametrize(
    "tensor",
    [
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        torch.tensor(1.0),
        torch.arange(12.0).reshape(3, 4)[1:, ::2],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor([float("nan")]),
        torch.empty(0),
        torch.zeros(1).expand(4),
    ],
    ids=["conjugate", "negative", "number", "part", "transposed", "NaN", "empty", "expanded"],
)
def test_a_tensor_of_any_layout_is_compared_by_its_values(tensor):
    model = Recurrent("in place")
    model.h = tensor
    state = ModelStateTracker(model)
    assert state.changed_names() == []
    is_the_same = not tensor.numel() or bool(tensor.isnan().all())
    model.h = tensor.clone() if is_the_same else tensor + 1  # a GPU's NaN has other bits
    assert state.changed_names() == ([] if is_the_same else ["h"])
