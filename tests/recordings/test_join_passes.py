"""cat and stack: a site's values of several passes, and messages that never mislead."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline as hl


class Gives(nn.Module):
    """Gives what it is given, from an inner module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, *values):
        for value in values:
            self.inner(value)


def recorded(*passes) -> hl.Recording:
    """A recording of these values at `inner`: a list for each pass, a value for each call."""
    model = Gives()
    with hl.record(model, "inner") as run:
        for values in passes:
            model(*values)
    return run


def suggestions(message: str) -> list[str]:
    """The code in a message that can be run as it stands."""
    return re.findall(r"run(?:\.\w+|\[\d+\])*[([](?:[^()]*)[)\]]", message.partition("\nWrite ")[2])


def test_batches_of_different_sizes_are_concatenated(net, image):
    with hl.record(net, "fc") as run:
        results = [net(image), net(image[:1])]
    assert torch.equal(run.cat("fc"), torch.cat(results))
    assert torch.equal(run.cat(run.sites[0]), torch.cat(results))
    assert [list(value.shape) for value in run.cat("fc", dim=None)] == [[2, 5], [1, 5]]


def test_passes_are_concatenated_in_order():
    parts = [torch.full((1, 2), float(k)) for k in range(3)]
    run = recorded(*([part] for part in parts))
    assert run.cat("inner")[:, 0].tolist() == [0, 1, 2]
    assert run.cat("inner", dim=1).shape == run.cat("inner", -1).shape == (1, 6)
    assert run.cat("inner#pass1")[:, 0].tolist() == [1]


def test_calls_of_one_pass_are_not_joined_as_rows():
    parts = [torch.full((1, 2), float(k)) for k in range(5)]
    run = recorded(parts[:2], parts[2:])
    for dim, code in ((0, "run.cat('inner#0')"), (1, "run.cat('inner#0', dim=1)")):
        with pytest.raises(hl.AmbiguousError) as caught:
            run.cat("inner", dim)
        assert str(caught.value) == (
            "'inner' must have one call in each pass to be concatenated, got 3 in a pass."
            f"\nWrite {code} for one call, or run.cat('inner', dim=None) for a list of all values."
        )
    with pytest.raises(hl.AmbiguousError, match=r"Write run.cat\('inner#0#pass1'\) for one call"):
        run.cat("inner#pass1")
    assert run.cat("inner#1")[:, 0].tolist() == [1, 3]
    assert run.cat("inner#2").tolist() == [[4, 4]]
    assert [int(value[0, 0]) for value in run.cat("inner", dim=None)] == [0, 1, 2, 3, 4]


def test_the_call_that_is_proposed_has_a_value():
    class FrozenFirst(Gives):
        def forward(self, x):
            with torch.no_grad():
                x = self.inner(x)
            x.requires_grad_()
            return self.inner(x) + self.inner(x)

    model = FrozenFirst()
    with hl.record(model, "inner:grad_output") as run:
        model(torch.ones(1, 2)).sum().backward()
    assert list(run) == ["inner:grad_output#1", "inner:grad_output#2"]
    for join in (run.cat, run.stack):
        with pytest.raises(hl.AmbiguousError, match="in a pass") as caught:
            join("inner:grad_output")
        assert [eval(way, {"run": run}) for way in suggestions(str(caught.value))]


def test_numbers_are_concatenated_to_a_row():
    run = recorded([torch.tensor(1.0)], [torch.tensor(2.0)], [torch.tensor(3.0)])
    assert run.cat("inner").tolist() == [1, 2, 3]


def test_a_leaf_is_concatenated_and_a_whole_structure_is_listed():
    values = [(torch.ones(n, 2), {"state": torch.ones(1)}) for n in (1, 2)]
    run = recorded([values[0]], [values[1]])
    assert run.cat("inner:output[0]").shape == (3, 2)
    assert run.cat("inner:output[1].state").shape == (2,)
    assert [type(value) for value in run.cat("inner", dim=None)] == [tuple, tuple]


def test_it_reads_a_folder_and_refuses_what_was_overwritten(net, image, tmp_path):
    with hl.record(net, ["fc", "layer1.0.bn"]) as run:
        net(image)
        net(image[:1])
    with pytest.raises(hl.OverwrittenError):
        run.cat("layer1.0.bn", dim=None)
    with hl.record(net, "fc") as run:
        net(image)
        net(image[:1])
    assert torch.equal(hl.open(run.save(tmp_path / "run")).cat("fc"), run.cat("fc"))


def test_ragged_values_say_what_joins_them():
    run = recorded([torch.zeros(2, 5)], [torch.zeros(2, 7)])
    with pytest.raises(hl.StructureError) as caught:
        run.cat("inner")
    assert str(caught.value) == (
        "the values at 'inner' must be tensors that differ in dimension 0 only, got"
        " Tensor[2, 5], Tensor[2, 7]."
        "\nWrite run.cat('inner', dim=1) for all in one tensor."
    )
    run = recorded([torch.zeros(2, 5)], [torch.zeros(3, 7)])
    with pytest.raises(hl.StructureError, match=r"\nWrite run.cat\('inner', dim=None\) for a list"):
        run.cat("inner")


def test_stacking_says_what_joins_where_it_cannot():
    with pytest.raises(hl.StructureError, match=r"\nWrite run.cat\('inner'\) for all in one"):
        recorded([torch.zeros(2, 5)], [torch.zeros(1, 5)]).stack("inner")
    with pytest.raises(hl.AmbiguousError, match=r"got 2 in a pass.\nWrite run.stack\('inner#0'\)"):
        recorded([torch.zeros(2, 5)] * 2).stack("inner")
    with pytest.raises(hl.StructureError, match=r"\nWrite run.cat\('inner:output\[0\]'\)"):
        recorded([(torch.zeros(2), None)], [(torch.zeros(2), 3)]).stack("inner")
    with pytest.raises(hl.StructureError, match=r"got Tensor\[2\], None.\nWrite .*dim=None"):
        recorded([torch.zeros(2)], [None]).stack("inner")


def test_a_dimension_that_is_not_there_is_named():
    run = recorded([torch.zeros(2, 5)], [torch.zeros(1, 5)])
    with pytest.raises(hl.StructureError, match=r"dim must be a dimension .*, got dim=2 for"):
        run.cat("inner", dim=2)
    for dim in ("0", 0.0, True, (0, 1)):
        with pytest.raises(hl.InputError, match=r"^dim must be the number of a dimension or None"):
            run.cat("inner", dim=dim)


def test_what_torch_cannot_join_is_listed():
    run = recorded([torch.zeros(2)], [torch.zeros(2, device="meta")])
    with pytest.raises(hl.StructureError, match=r"cannot be joined: (?s:.)*dim=None\) for a list"):
        run.cat("inner")
    assert len(run.cat("inner", dim=None)) == 2


def test_a_look_up_of_several_passes_suggests_what_joins_them():
    for passes, way in (
        ([[torch.zeros(2)]] * 2, "run.stack('inner')"),
        ([[torch.zeros(2)], [torch.zeros(3)]], "run.cat('inner')"),
        ([[torch.zeros(2), torch.zeros(2)]] * 2, "run.stack('inner#0') for one call"),
        ([[torch.zeros(2), torch.zeros(2)], [torch.zeros(1)]], "run.cat('inner#0') for one call"),
        ([["a"], ["b"]], "run.cat('inner', dim=None)"),
    ):
        with pytest.raises(hl.AmbiguousError) as caught:
            recorded(*passes)["inner"]
        assert way in str(caught.value)


sizes = st.integers(0, 2)
tensors = st.lists(sizes, max_size=3).map(torch.zeros)
values = st.one_of(
    tensors, st.none(), st.tuples(tensors, tensors), st.fixed_dictionaries({"a": tensors})
)


@given(st.lists(st.lists(values, min_size=1, max_size=2), min_size=1, max_size=3))
def test_no_message_suggests_what_fails(passes):
    run = recorded(*passes)
    flat = [value for values in passes for value in values]
    assert len(run.cat("inner", dim=None)) == len(flat)
    for ask in (
        lambda: run["inner"],
        lambda: run.stack("inner"),
        lambda: run.cat("inner"),
        lambda: run.cat("inner", dim=1),
        lambda: run.calls("inner"),
        lambda: run.tensor(next(iter(run))),
    ):
        said = ""
        try:
            ask()
        except hl.HooklineError as error:  # and no other
            said = str(error)
        ways = suggestions(said)
        assert bool(ways) == bool(said) or "'inner#0' to" in said, said
        for way in ways:
            eval(way, {"run": run})


@given(st.lists(st.lists(values, min_size=1, max_size=2), min_size=1, max_size=3))
def test_every_value_is_in_the_items_once(passes):
    run = recorded(*passes)
    flat = [value for values in passes for value in values]
    assert len(dict(run.items())) == len(run) == len(flat)
    for value, (key, found) in zip(flat, run.items(), strict=True):
        assert str(value) == str(found) == str(run[key])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_listed_not_joined(layout):
    model = nn.Identity()
    with hl.record(model) as run:
        for _ in range(2):
            model(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout))
    with pytest.raises(hl.StructureError, match=r"Write run.cat\('\(root\)', dim=None\)"):
        run.cat("(root)")
    assert len(run.cat("(root)", dim=None)) == 2
