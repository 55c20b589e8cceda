"""hl.edits.reroute: the choices of a router, replayed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hookline as hl
from tiny_transformers import tiny

IDS, OTHER = torch.randint(3, 50, (2, 2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 9, dtype=torch.long)
MASK[0, :3] = 0
GATES = {
    "mixtral": "model.layers.*.mlp.gate", "qwen2moe": "model.layers.*.mlp.gate",
    "olmoe": "model.layers.*.mlp.gate", "gpt_oss": "model.layers.*.mlp.router",
}  # fmt: skip


def routed(model, gates, ids=IDS, **options):
    with torch.no_grad(), hl.record(model, gates) as run:
        logits = model(ids, attention_mask=MASK, **options).logits
    return run, logits


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_another_precision_goes_to_the_same_experts(name):
    gates = GATES[name]
    model = tiny(name)
    run, clean = routed(model, gates)
    with hl.edit(model, gates, hl.edits.reroute(run)):  # its own choices
        assert torch.equal(routed(model, gates)[1], clean)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for gate in hl.select(other, gates):
            weight = other.get_submodule(gate.path).weight
            weight += 0.4 * weight.std() * torch.randn_like(weight)
    with hl.record(other, gates) as plain, torch.no_grad():
        other(IDS, attention_mask=MASK)
    with hl.edit(other, gates, hl.edits.reroute(run)), hl.record(other, gates) as seen:
        other(IDS, attention_mask=MASK).logits.sum().backward()
    moved = 0
    for site in map(str, run.sites):
        logits, scores, indices = seen[site]
        assert torch.equal(indices, run[site][2])
        moved += int((indices != plain[site][2]).any(-1).sum())
        own = plain[site][0]
        if site == str(run.sites[0]):  # the same input: only the choices differ
            assert torch.equal(logits, own)
        # Up to transformers 5.4 some routers return probabilities in place of logits.
        is_distribution = torch.allclose(logits.sum(-1), torch.ones(()))
        all_probabilities = logits if is_distribution else logits.softmax(-1)
        probabilities = all_probabilities.gather(-1, indices)
        if name in ("mixtral", "gpt_oss"):
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        torch.testing.assert_close(scores, probabilities)
        assert other.get_submodule(site).weight.grad.any()
    assert moved


@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_generate_is_replayed_step_by_step(name):
    model, gates = tiny(name), GATES[name]
    options = {"attention_mask": MASK, "max_new_tokens": 3, "do_sample": False}
    with hl.record(model, gates) as run:
        clean = model.generate(IDS, **options)
    with hl.edit(model, gates, hl.edits.reroute(run)), hl.record(model, gates) as seen:
        assert torch.equal(model.generate(IDS, **options), clean)
    for then, now in zip(run.passes, seen.passes, strict=True):
        assert all(torch.equal(then[site][2], now[site][2]) for site in then)


class Router(nn.Module):
    """A router of any rule, which can be planted with faults."""

    def __init__(self, rule="softmax", n_experts=6, k=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_experts, 8))
        self.rule, self.k = rule, k
        self.fault = lambda logits, scores, indices: (logits, scores, indices)

    def forward(self, x):
        logits = x @ self.weight.T
        best, indices = logits.topk(self.k)
        if self.rule == "biased":  # as Ernie 4.5 and DeepSeek balance their experts
            indices = (logits + 5 * torch.arange(logits.shape[1])).topk(self.k).indices
        scores = logits.softmax(-1).gather(-1, indices)
        if self.rule == "renormalised":
            scores = scores / scores.sum(-1, keepdim=True)
        if self.rule == "over chosen":
            scores = best.softmax(-1)
        if self.rule == "sigmoid":
            scores = best.sigmoid()
        if self.rule == "scaled":
            scores = scores * 2.5
        if self.rule == "after top-k":  # zeros but for the chosen, as wide as the experts
            scores = torch.zeros_like(logits).scatter(-1, indices, scores)
        if "probabilities" in self.rule:  # as in transformers 5.0
            logits = logits.softmax(-1)
            scores = logits.gather(-1, indices)
            if "renormalised" in self.rule:
                scores = scores / scores.sum(-1, keepdim=True)
        return self.fault(logits, scores, indices)


class Mixture(nn.Module):
    def __init__(self, rule="softmax"):
        super().__init__()
        self.gates = nn.ModuleList(Router(rule) for _ in range(2))

    def forward(self, x):
        return [gate(x) for gate in self.gates]


X = torch.randn(10, 8, generator=torch.Generator().manual_seed(3))


def mixture(rule="softmax"):
    torch.manual_seed(0)
    return Mixture(rule)


def replay(model, run, x=X):
    with hl.edit(model, "gates.*", hl.edits.reroute(run)):
        return model(x)


def run_of(model, x=X):
    with torch.no_grad(), hl.record(model, "gates.*") as run:
        model(x)
    return run


@pytest.mark.parametrize(
    "rule",
    ["softmax", "renormalised", "over chosen", "probabilities", "probabilities renormalised"],
)
def test_scores_and_gradients_are_those_of_a_router(rule):
    model = mixture(rule)
    run = run_of(model)
    x = X + 0.3 * torch.randn(10, 8)
    plain = model(x)
    replayed = replay(model, run, x)
    assert any((a[2] != b[2]).any() for a, b in zip(plain, replayed, strict=True))
    sum(scores.square().sum() for _, scores, _ in replayed).backward()
    for gate, (logits, scores, indices), site in zip(
        model.gates, replayed, map(str, run.sites), strict=True
    ):
        weight = gate.weight.detach().clone().requires_grad_()
        own = x @ weight.T
        wanted = own.softmax(-1).gather(-1, run[site][2])
        if rule not in ("softmax", "probabilities"):
            wanted = wanted / wanted.sum(-1, keepdim=True)
        wanted.square().sum().backward()
        torch.testing.assert_close(scores, wanted)
        torch.testing.assert_close(gate.weight.grad, weight.grad)
        assert torch.equal(logits, own.softmax(-1) if "probabilities" in rule else own)
        assert torch.equal(indices, run[site][2])


def stale_padding(logits, scores, indices):
    return logits, scores, indices.index_put((torch.tensor([7, 8, 9]),), indices[:3])


def zero_padding(logits, scores, indices):
    return logits, scores, indices.index_fill(0, torch.tensor([8, 9]), 0)


def one_expert_for_padding(logits, scores, indices):
    return logits, scores, indices.index_copy(0, torch.tensor([8, 9]), torch.tensor([[3, 1]] * 2))


@pytest.mark.parametrize("fault", [stale_padding, zero_padding, one_expert_for_padding])
def test_rows_of_padding_that_were_filled_in_later_are_refused(fault):
    model = mixture()
    model.gates[1].fault = fault
    run = run_of(model)
    model.gates[1].fault = Router().fault
    with pytest.raises(
        hl.StructureError, match=r"recorded at gates.1 must be the best .* in [23] "
    ):
        replay(model, run)


def test_the_choices_of_another_router_are_refused():
    model = mixture()
    model.gates[0], model.gates[1] = model.gates[1], model.gates[0]
    run = run_of(model)
    model.gates[0], model.gates[1] = model.gates[1], model.gates[0]
    with pytest.raises(hl.StructureError, match=r"gates.0 must be of the same tokens and router"):
        replay(model, run)


def test_the_choices_of_another_request_are_refused():
    model = mixture()
    with pytest.raises(hl.StructureError, match=r"gates.0 must be of the same tokens and router"):
        replay(model, run_of(model, X.flip(0)))


def test_scores_that_are_gathered_after_top_k_are_refused():
    model = mixture("after top-k")
    with pytest.raises(hl.StructureError, match=r"routers that return \(logits, scores, indices\)"):
        replay(model, run_of(model))


@pytest.mark.parametrize("rule", ["sigmoid", "scaled"])
def test_other_rules_are_refused(rule):
    model = mixture(rule)
    with pytest.raises(
        hl.StructureError, match=r"must know how gates.0 makes its scores.*\n.*func"
    ):
        replay(model, run_of(model))


def test_a_router_with_a_bias_to_choose_is_told_what_to_do():
    model = mixture("biased")
    with pytest.raises(hl.StructureError, match=r"best of the recorded.*\n.*bias of each expert"):
        replay(model, run_of(model))


class Given(nn.Module):
    """A router that is given its logits."""

    def forward(self, logits):
        scores, indices = logits.softmax(-1).topk(2)
        return logits, scores, indices


def test_two_rules_that_cannot_be_told_apart_are_refused():
    then = torch.tensor([[30.0, 29.0, 1.0, 0.0], [0.0, 30.0, 1.0, 29.0]] * 6)
    now = then.clone()
    now[0] = torch.tensor([30.0, 0.0, 29.0, 1.0])  # two experts have all of the softmax
    model = Given()
    with hl.record(model) as run:
        model(then)
    with hl.edit(model, "(root)", hl.edits.reroute(run)):
        with pytest.raises(hl.StructureError, match=r"two rules make, which differ"):
            model(now)
        assert torch.equal(model(then)[1], then.softmax(-1).topk(2)[0])


def test_other_forms_and_sizes_are_refused():
    model = mixture()
    run = run_of(model)
    with pytest.raises(hl.StructureError, match=r"one choice for each token at gates.0: expected"):
        replay(model, run, X[:5])
    for site in ("gates.0:output[2]", "gates.0:input"):
        with pytest.raises(
            hl.AttachError, match=r"must be given the output of a router, got gates"
        ):
            hl.edit(model, site, hl.edits.reroute(run))
    with pytest.raises(hl.AttachError, match=r"reroute must be given a recording"):
        hl.edits.reroute(run["gates.0"])
    with pytest.raises(hl.AttachError, match=r"needs the site"):
        hl.edits.reroute(run)(X)
    assert not hl.inventory(model)
