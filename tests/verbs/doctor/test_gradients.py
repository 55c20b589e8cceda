"""Why no gradient would come to a site: each cause is named, and its remedy brings one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.ones(3, 2)
BACK = ("output", "grad_output", "grad_input", "grad")


class Through(nn.Module):
    """Two layers; between them, or in one, something is done to the gradient's way."""

    def __init__(self, between=None, **switches):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.between = between or (lambda value: value)
        self.no_grad = switches.get("no_grad", False)
        self.reentrant = switches.get("reentrant")

    def forward(self, x):
        if self.no_grad:
            with torch.no_grad():
                x = self.a(x)
        elif self.reentrant is None:
            x = self.a(x)
        else:
            x = checkpoint(self.a, x, use_reentrant=self.reentrant)
        return self.b(self.between(x))


def never(found: hl.Diagnosis, site: str) -> tuple[str, str]:
    assert found[site].verdict == "never"
    assert not found.ok
    return found[site].why, found[site].remedy


def test_gradients_that_flow_fire_and_what_they_are_of_is_told():
    found = hl.doctor(Through(), X.clone().requires_grad_(), ports=BACK)
    assert found.ok
    assert found.ran == "forward and backward"
    assert [note.what for note in found.notes if note.about == "backward"] == [
        "run from the sum of the outputs, because no loss was given"
    ]


def test_a_frozen_parameter_is_told():
    model = Through()
    model.a.weight.requires_grad_(False)
    for inputs in (X, None):  # it is so with and without a run
        why, remedy = never(hl.doctor(model, inputs, "a.weight:grad"), "a.weight:grad")
        assert why == "it is frozen: requires_grad is False"
        assert remedy == "call requires_grad_() on it"
    model.a.weight.requires_grad_()
    assert hl.doctor(model, X, "a.weight:grad").ok


def test_a_frozen_beginning_is_told_and_either_remedy_helps():
    model = Through()
    model.a.requires_grad_(False)
    why, remedy = never(hl.doctor(model, X, "a:grad_output"), "a:grad_output")
    assert why.startswith("its output needs no gradient: nothing that it is computed from")
    assert "x.requires_grad_()" in remedy
    assert hl.doctor(model, X.clone().requires_grad_(), "a:grad_output").ok
    model.a.requires_grad_()
    assert hl.doctor(model, X, "a:grad_output").ok


def test_the_input_of_the_first_layer_is_told():
    why, remedy = never(hl.doctor(Through(), X, "a:grad_input"), "a:grad_input")
    assert why.startswith("its input needs no gradient")
    assert "x.requires_grad_()" in remedy


def test_a_layer_that_detaches_what_it_returns_is_told():
    class Detaching(nn.Linear):
        detaches = True

        def forward(self, x):
            value = super().forward(x)
            return value.detach() if self.detaches else value

    model = nn.Sequential(Detaching(2, 2), nn.Linear(2, 2))
    why, remedy = never(hl.doctor(model, X, "0", ports=BACK[:2]), "0:grad_output")
    assert why == ("its output needs no gradient although its parameters do: it is detached inside")
    assert ".detach()" in remedy
    Detaching.detaches = False
    assert hl.doctor(model, X, "0", ports=BACK[:2]).ok


def test_what_is_detached_behind_a_layer_is_told_with_parameters():
    found = hl.doctor(Through(torch.Tensor.detach), X, "a", ports=("grad_output", "grad"))
    why, remedy = never(found, "a:grad_output")
    assert why == "no gradient reached it: the sum of its outputs does not depend on it"
    assert ".detach(), .data, .item() or argmax behind it" in remedy
    assert (
        never(found, "a.weight:grad")[0] == "unused: the sum of its outputs does not depend on it"
    )
    assert hl.doctor(Through(), X, "a", ports=("grad_output", "grad")).ok


def test_a_loss_that_leaves_a_part_out_is_told():
    model = nn.Sequential(nn.Linear(2, 2))
    model.heads = nn.ModuleDict({"one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})

    def both():
        return [head(model[0](X)).sum() for head in model.heads.values()]

    found = hl.doctor(model, lambda: both()[0] * 2, "heads.*", ports=("grad_output", "grad"))
    assert found["heads.one:grad_output"].verdict == "fires"
    assert never(found, "heads.two:grad_output")[0].endswith(
        "the model's output does not depend on it"
    )
    assert never(found, "heads.two.weight:grad")[0].startswith("unused: the model's output")
    found = hl.doctor(model, lambda: sum(both()), "heads.*", ports=("grad_output", "grad"))
    assert found.ok


def test_the_parameters_of_what_does_not_run_are_told():
    model = Through()
    model.c = nn.Linear(2, 2)
    why, _ = never(hl.doctor(model, X, "c.weight:grad"), "c.weight:grad")
    assert why == "its module, c, did not run"
    assert never(hl.doctor(model, X, "c:grad_output"), "c:grad_output")[0].startswith("not reached")


def test_the_parameters_of_what_runs_in_the_other_mode_are_told():
    class Auxiliary(Through):
        def forward(self, x):
            return self.a(x) + self.b(x) if self.training else self.a(x)

    why, remedy = never(hl.doctor(Auxiliary().eval(), X, "b.weight:grad"), "b.weight:grad")
    assert why == "only called in training mode, and the model is in eval mode"
    assert remedy == "model.train()"


def test_no_parameter_is_called_unused_if_the_run_raised():
    def raises(value):
        raise RuntimeError("half-way")

    why, remedy = never(hl.doctor(Through(raises), X, "b.weight:grad"), "b.weight:grad")
    assert why == "the run raised before a gradient came here"
    assert remedy == "mend the failure below first"


@pytest.mark.parametrize("how", ["forward", "weights"])
def test_a_parameter_of_what_ran_without_a_call_is_called_unused(how):
    class Past(Through):
        def forward(self, x):
            b = self.b.forward(x) if how == "forward" else x @ self.b.weight
            return self.a(x) + b.detach()

    why, _ = never(hl.doctor(Past(), X, "b.weight:grad"), "b.weight:grad")
    assert why == "unused: the sum of its outputs does not depend on it"


@pytest.mark.parametrize("kind", ["complex", "several", "attribute"])
def test_outputs_of_every_kind_bring_gradients(kind):
    class Out(Through):
        def forward(self, x):
            a, b = self.a(x), self.b(x)
            if kind == "complex":
                return torch.complex(a, b)
            return SimpleNamespace(loss=a.mean(), other=b) if kind == "attribute" else (a, [b])

    found = hl.doctor(Out(), X, "*", ports=("grad_output", "grad"))
    if kind != "attribute":
        assert found.ok
        return
    assert found["a:grad_output"].verdict == "fires"
    assert never(found, "b:grad_output")[0].endswith("its output's loss does not depend on it")


def test_integers_are_told_and_the_site_named_instead_fires():
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    ids = torch.tensor([[0, 1]])
    why, remedy = never(hl.doctor(model, ids, "0:grad_input"), "0:grad_input")
    assert why == "its input is int64, and only floating tensors have gradients"
    assert remedy == "select '0:grad_output', whose value is floating"
    assert hl.doctor(model, ids, "0:grad_output").ok


def test_gradients_switched_off_around_the_doctor_are_told():
    with torch.no_grad():
        found = hl.doctor(Through(), X, "*", ports=("grad_output", "grad"))
    for site in ("a:grad_output", "b.weight:grad"):
        why, remedy = never(found, site)
        assert why == "gradients are switched off here (torch.no_grad or inference_mode)"
        assert "outside of that block" in remedy
    assert found.environment["gradients"] == "off (no_grad)"
    with torch.inference_mode():
        assert hl.doctor(Through(), X).environment["gradients"] == "inference mode"
    assert hl.doctor(Through(), X, "*", ports=("grad_output", "grad")).ok


def test_gradients_that_the_model_switches_off_are_told():
    why, remedy = never(hl.doctor(Through(no_grad=True), X, "a:grad_output"), "a:grad_output")
    assert why.startswith("the model itself switches gradients off here: by torch.no_grad()")
    assert remedy.startswith("remove the no_grad")


def test_reentrant_checkpoints_are_told_others_bring_gradients():
    x = X.clone().requires_grad_()
    model = Through(reentrant=True)
    before = [parameter.grad for parameter in model.parameters()]
    found = hl.doctor(model, x, "a", ports=("output", "grad"))
    assert found["a"].verdict == "fires"  # once: the recomputation is no call
    assert found["a.weight:grad"].verdict == "fires"
    assert any("use_reentrant=True" in note.what for note in found.notes)
    assert [parameter.grad for parameter in model.parameters()] == before
    assert x.grad is None
    found = hl.doctor(Through(reentrant=False), x, "a", ports=("output", "grad_output", "grad"))
    assert found.ok
    assert not any(note.about == "checkpointing" for note in found.notes)


def test_reentrant_checkpoints_are_not_run_backward_past_hooks():
    model, steps = Through(reentrant=True), []
    model.b.weight.register_post_accumulate_grad_hook(steps.append)
    found = hl.doctor(model, X.clone().requires_grad_(), "b:grad_output")
    assert (
        "which would also run the hooks after gradient accumulation"
        in never(found, "b:grad_output")[0]
    )
    assert not steps


def test_an_output_without_a_graph_is_told_and_a_loss_helps():
    class Labels(nn.Linear):
        def forward(self, x):
            self.scores = super().forward(x)
            return self.scores.argmax(1)

    model = nn.Sequential(nn.Linear(2, 2), Labels(2, 2))
    why, remedy = never(hl.doctor(model, X, "0:grad_output"), "0:grad_output")
    assert why.startswith("no backward could be run: no output requires a gradient")
    assert remedy == (
        "give a function that returns the loss: hl.doctor(model, lambda: loss(model(x)))"
    )

    def loss():
        model(X)
        return model[1].scores.square().sum()

    assert hl.doctor(model, loss, "0:grad_output").ok
    assert not hasattr(model[1], "scores")


def test_a_function_may_run_backward_and_no_grad_is_changed():
    model = Through()
    model(X).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    held = [parameter.grad for parameter in model.parameters()]
    found = hl.doctor(model, lambda: model(X).sum().backward(), "a", ports=("grad_output", "grad"))
    assert found.ok
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    assert all(map(torch.equal, held, before))


def test_the_loss_in_an_output_is_what_backward_runs_from():
    class WithLoss(Through):
        def forward(self, x):
            return {"loss": self.a(x).sum(), "other": self.b(x)}

    found = hl.doctor(WithLoss(), X, "*:grad_output")
    assert found["a:grad_output"].verdict == "fires"
    why, _ = never(found, "b:grad_output")
    assert why == "no gradient reached it: its output's loss does not depend on it"


def test_a_backward_that_raises_is_told():
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no way back")

    found = hl.doctor(Through(Raising.apply), X, "a", ports=("output", "grad_output"))
    assert found["a"].verdict == "fires"
    assert never(found, "a:grad_output")[0] == "the run raised before a gradient came here"
    assert "RuntimeError: no way back" in found.failure.what


def test_quantised_values_are_told():
    class Quantising(nn.Module):
        on = True

        def forward(self, x):
            return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8) if self.on else x

    class Dequantising(nn.Module):
        def forward(self, x):
            return x.dequantize() if x.is_quantized else x

    model = nn.Sequential(nn.Linear(2, 2), Quantising(), Dequantising())
    why, remedy = never(hl.doctor(model, X, "1:grad_output"), "1:grad_output")
    assert why == "its output is quantised, and has no gradient"
    assert remedy == "take the gradients of the float model, before it is quantised"
    Quantising.on = False
    assert hl.doctor(model, X, "1:grad_output").ok


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_gradient_at_a_call_that_does_not_come_is_told(looped, port):
    found = hl.doctor(looped, X.clone().requires_grad_(), [f"block:{port}#5", f"block:{port}#1"])
    assert "so call #5 never came" in never(found, f"block:{port}#5")[0]
    assert found[f"block:{port}#1"].verdict == "fires"
