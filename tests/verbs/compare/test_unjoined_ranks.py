"""Values of ranks that cannot be joined: copies are compared one by one, and nothing is guessed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import hookline as hl

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8))


def recorded(model, x=X, edit=None, sites=("**", "(root):input"), ports=("output",)):
    model.zero_grad()
    edited = contextlib.nullcontext() if edit is None else hl.edit(model, "0", edit)
    with hl.record(model, list(sites), ports=ports, copy=True) as run, edited:
        for part in x if isinstance(x, list) else [x]:
            model(part).square().sum().backward()
    return run


def of_ranks(*runs):
    """A recording of several ranks, as hl.open gives it."""
    together = hl.Recording(runs[0].sites, runs[0].report(), runs[0].modules)
    together.ranks = runs
    return together


def values(*tensors):
    """Ranks with a value each at one site, without recorded inputs."""
    return of_ranks(*(recorded(Gives(tensor), sites=("of",)) for tensor in tensors))


class Gives(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.of = nn.Identity()
        self.value = value
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.of(self.value)
        return self.weight * x


def beside(value):
    return recorded(Gives(value), sites=("of",))


@pytest.mark.parametrize("dims", [None, 0])
@pytest.mark.parametrize("wrong", range(4))
def test_each_rank_of_two_with_the_same_rows_is_compared(wrong, dims):
    halves = [X[:2], X[:2], X[2:], X[2:]]
    edits = [hl.edits.scale(1.1) if rank == wrong else None for rank in range(4)]
    runs = [recorded(net(), half, edit) for half, edit in zip(halves, edits, strict=True)]
    single = recorded(net())
    comparison = hl.compare(of_ranks(*runs), single, dims=dims)
    assert comparison.first.site == "0"
    assert comparison.first.why == f"rank {wrong}: relative 0.1"
    assert hl.compare(single, of_ranks(*runs), dims=dims).first.site == "0"
    clean = of_ranks(*(recorded(net(), half) for half in halves))
    assert hl.compare(clean, single, dims=dims).ok
    assert not hl.compare(clean, single, dims=dims).findings


@pytest.mark.parametrize("sites", [("**", "(root):input"), ("**",)])
def test_each_rank_with_the_same_batch_is_compared(sites):
    runs = [recorded(net(), X, edit, sites) for edit in (None, None, hl.edits.scale(1.1))]
    comparison = hl.compare(of_ranks(*runs), recorded(net(), X, sites=sites))
    assert (comparison.first.site, comparison.first.why) == ("0", "rank 2: relative 0.1")


def test_a_row_that_a_second_rank_has_too_is_compared():
    halves = [X[:2], torch.cat([X[2:], X[:1]])]  # as a sampler that fills up the last rank

    def wrong_in_the_last_row(value):
        return torch.cat([value[:-1], value[-1:] * 1.1])

    for edit, is_ok in ((None, True), (wrong_in_the_last_row, False)):
        runs = recorded(net(), halves[0]), recorded(net(), halves[1], edit)
        for sides in ((of_ranks(*runs), recorded(net())), (recorded(net()), of_ranks(*runs))):
            assert hl.compare(*sides).ok is is_ok


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_gradients_of_copies_are_of_the_same_tokens(factor):
    ports = ("output", "grad")
    single = recorded(net(), ports=ports)
    runs = [recorded(net(), X, hl.edits.scale(factor), ports=ports) for _ in range(4)]
    for run, half in zip(runs, (X[:2], X[:2], X[2:], X[2:]), strict=True):
        rows = recorded(net(), half)
        run.passes[0]._pass.log[:] = [  # the rows of a half, and the gradients of the whole
            *(entry for entry in run.passes[0]._pass.log if run.sites[entry[0]].port == "grad"),
            *(
                (run.sites.index(rows.sites[entry[0]]), *entry[1:])
                for entry in rows.passes[0]._pass.log
            ),
        ]
    row = hl.compare(of_ranks(*runs), single)["2.weight:grad"]
    assert row.verdict == ("differs" if factor > 1 else "identical")


def test_split_columns_are_joined_among_ranks_with_the_same_rows():
    halves = [X[:2], X[:2], X[2:], X[2:]]
    runs = []
    for rank, half in enumerate(halves):
        part = net()
        place = slice(8 * (rank % 2), 8 * (rank % 2) + 8)
        part[0].weight = nn.Parameter(part[0].weight[place].detach())
        part[2] = nn.Linear(8, 8)
        part[2].weight = nn.Parameter(net()[2].weight[:, place].detach())
        runs.append(recorded(part, half, sites=("0", "1", "(root):input")))
    single = recorded(net(), sites=("0", "1", "(root):input"))
    assert hl.compare(of_ranks(*runs), single, dims={"*": -1}).ok
    unsaid = hl.compare(of_ranks(*runs), single)
    assert unsaid["0"].verdict == "not comparable"
    runs[2] = recorded(net()[:1], X[2:], sites=("0", "(root):input"))
    assert not hl.compare(of_ranks(*runs), single, dims={"*": -1}).ok


def test_partial_sums_are_added_among_ranks_with_the_same_rows():
    parts = [X[:2] * 0.25, X[:2] * 0.75, X[2:] * 0.5, X[2:] * 0.5]
    halves = [X[:2], X[:2], X[2:], X[2:]]
    runs = [
        recorded(Gives(part), half, sites=("of", "(root):input"))
        for part, half in zip(parts, halves, strict=True)
    ]
    single = recorded(Gives(X), sites=("of", "(root):input"))
    assert hl.compare(of_ranks(*runs), single, dims={"of": "sum"}).ok
    why = hl.compare(of_ranks(*runs), single)["of"].why
    assert why.endswith("their sum is that of the other side: give dims={'of': 'sum'}")


def test_replicas_with_equal_rows_are_not_added_up():
    parts = [X * 0.25, X * 0.75, X * 0.25, X * 0.75]
    for dim in ("sum", -1):
        row = hl.compare(values(*parts), beside(X), dims={"of": dim})["of"]
        assert row.verdict == "not comparable"
        assert "the ranks come as replicas with equal values" in row.why
    assert hl.compare(values(*parts), beside(X / 2), dims={"of": "mean"}).ok
    assert hl.compare(values(*[X * 0.25] * 4), beside(X), dims={"of": "sum"}).ok


def test_a_nan_on_all_ranks_is_told_where_it_is():
    odd = X.clone()
    odd[1, 2] = torch.nan
    row = hl.compare(values(odd, odd.clone()), beside(X))["of"]
    assert (row.verdict, row.why) == ("differs", "1 element NaN or infinite in one of the two")
    row = hl.compare(values(X, odd), beside(X))["of"]
    assert row.why == "rank 1: 1 element NaN or infinite in one of the two"
    assert hl.compare(values(odd, odd.clone()), beside(odd)).ok


def test_the_reduction_that_gives_the_other_value_is_advised():
    parts = X * 0.25, X * 0.75
    for op, whole in (("sum", X), ("mean", X / 2)):
        why = hl.compare(values(*parts), beside(whole))["of"].why
        assert why.endswith(f"give dims={{'of': '{op}'}}")
        assert hl.compare(values(*parts), beside(whole), dims={"of": op}).ok
    why = hl.compare(values(*parts), beside(X * 3))["of"].why
    assert "give dims={'of': …}" in why


def test_a_rank_of_zeros_is_neither_copy_nor_summand():
    row = hl.compare(values(X, X * 0), beside(X))["of"]
    assert row.verdict == "not comparable"
    assert row.why.endswith(
        "give dims={'of': 'sum'} if they are summands; of copies, some are wrong"
    )


def test_copies_of_integers_are_no_summands():
    numbers = torch.arange(6)
    row = hl.compare(values(numbers, numbers + 1), beside(numbers))["of"]
    assert (row.verdict, row.why) == ("differs", "rank 1: 6 of 6 integers not equal")
    why = hl.compare(values(numbers + 1, numbers + 2), beside(numbers))["of"].why
    assert "'sum'" not in why


def test_advised_dims_are_accepted():
    runs = [recorded(net(), [X * rank, X], sites=("**",)) for rank in (2, 3)]
    single = recorded(net(), [X * 5, X], sites=("**",))
    for row in hl.compare(of_ranks(*runs), single):
        dims = row.why.rpartition("give dims=")[2].partition(", with")[0].replace("…", "'sum'")
        if dims:
            hl.compare(of_ranks(*runs), single, dims=eval(dims))
    assert hl.compare(values(X, X * 2), beside(X * 3), dims={"of": "sum"}).ok


def test_two_recordings_of_as_many_ranks_go_rank_by_rank():
    runs = [of_ranks(*(recorded(net(), X * rank, sites=("**",)) for rank in (2, 3))) for _ in "ab"]
    assert hl.compare(*runs).ok
    odd = of_ranks(runs[0].ranks[0], recorded(net(), X * 3.3, sites=("**",)))
    row = hl.compare(odd, runs[1]).first
    assert (row.site, row.why) == ("0", "rank 1: relative 0.1")
    with_inputs = [of_ranks(*(recorded(net(), half) for half in (X[:2], X[2:]))) for _ in "ab"]
    assert hl.compare(*with_inputs).ok


def test_other_numbers_of_passes_are_told_by_rank():
    sites = ("**",)
    runs = of_ranks(recorded(net(), X, None, sites), recorded(net(), [X, X], None, sites))
    with pytest.raises(hl.InputError) as caught:
        hl.compare(runs, recorded(net(), X, None, sites))
    assert "rank 0: 1 pass; rank 1: 2 passes.\nGive one pass of one rank" in str(caught.value)
    assert "hl.open(folder).ranks[1].passes[0]" in str(caught.value)
    assert hl.compare(runs.ranks[1].passes[0], recorded(net(), X, None, sites)).ok


@pytest.mark.parametrize("is_wrong", [False, True])
def test_rows_of_ranks_with_other_numbers_of_passes_are_matched(is_wrong):
    edit = hl.edits.scale(1.1) if is_wrong else None
    runs = of_ranks(recorded(net(), X[:2]), recorded(net(), [X[2:3], X[3:]], edit))
    assert hl.compare(runs, recorded(net())).ok is not is_wrong


def test_stages_of_a_pipeline_are_compared_one_by_one():
    model = net()
    with torch.no_grad():
        middle = model[:2](X)
    stages = [recorded(model[:2], X), recorded(nn.Sequential(model[2]), middle)]
    comparison = hl.compare(of_ranks(*stages), recorded(model))
    assert "the ranks have other modules, as in a pipeline" in comparison["0"].why
    assert comparison["1"].verdict == "identical"
    by_rank = hl.compare(recorded(model), stages[1], names={"0": "2"})
    assert by_rank["2"].verdict == "identical"


def test_a_rank_without_a_row_in_the_other_run_is_named():
    runs = of_ranks(recorded(net(), X[:2]), recorded(net(), X[2:]))
    comparison = hl.compare(runs, recorded(net(), X[:2]))
    told = [finding.text for finding in comparison.findings if finding.kind == "tokens"]
    assert "no row of rank 1 is in b: what is there is not compared" in told


def test_weights_that_differ_between_ranks_are_told():
    models = [net() for _ in range(3)]
    with torch.no_grad():
        models[1][2].weight *= 2
    runs = of_ranks(*(recorded(model, X) for model in models[:2]))
    told = [f.text for f in hl.compare(runs, recorded(models[2])).findings if f.kind == "model"]
    assert told[0].startswith("ranks 0 and 1 of a have different weights")
    same = of_ranks(*(recorded(model, X) for model in (models[0], models[2])))
    assert hl.compare(same, recorded(models[0])).findings == []
    told = [f.text for f in hl.compare(same, recorded(models[1])).findings if f.kind == "model"]
    assert told[0].startswith("weights of the model differ")
    told = [f.text for f in hl.compare(runs, same).findings if f.kind == "model"]
    assert told[0].startswith("on rank 1: weights of the model differ")


def test_rows_without_a_value_on_one_rank_are_told():
    runs = (
        recorded(net(), X[:2], sites=("0", "1", "(root):input")),
        recorded(net(), X[2:], sites=("0", "(root):input")),
    )
    comparison = hl.compare(of_ranks(*runs), recorded(net(), sites=("0", "1", "(root):input")))
    told = [finding.text for finding in comparison.findings if finding.kind == "tokens"]
    assert told == ["tokens or rows with a value on one side alone, which were not compared: 1 (2)"]
