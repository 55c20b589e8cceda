"""Parts of DTensors joined by their layouts, against torch's own cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline.recordings.join_dtensor_parts import DTensorLayout, guess_layout_text, join_parts

QUESTION = "run.full('fc', dim=None)"


def layouts(shape, mesh, placements, first=0):
    """The layout of each rank of a mesh."""
    return [
        DTensorLayout(tuple(shape), tuple(mesh), (), first, at, tuple(placements))
        for at in itertools.product(*map(range, mesh))
    ]


def cut(whole, layout):
    """A rank's part as torch cuts it, one dimension of the mesh after the other."""
    part = whole
    for at, n, row in zip(layout.at, layout.mesh, layout.placements, strict=True):
        if row[0] == "shard":
            part = chunks(part, n, row[1])[at]
        elif row[0] == "strided":
            pieces = [chunks(piece, n, row[1])[at] for piece in chunks(part, row[2], row[1])]
            part = torch.cat(pieces, row[1])
        elif row[0] == "partial":
            part = part * (at + 1)
    return part


def chunks(tensor, n, dim):
    parts = list(tensor.chunk(n, dim)) if tensor.shape[dim] else [tensor] * n
    return parts + [tensor.narrow(dim, 0, 0)] * (n - len(parts))


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(("replicate",)),
        st.tuples(st.just("shard"), dims),
        st.tuples(st.just("strided"), dims, st.integers(1, 3)),
        st.just(("partial", "sum")),
    )
    return shape, mesh, [draw(placement) for _ in mesh]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cases())
def test_parts_join_to_the_whole_they_were_cut_from(case):
    shape, mesh, placements = case
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [(layout, cut(whole, layout)) for layout in layouts(shape, mesh, placements)]
    times = 1
    for n, row in zip(mesh, placements, strict=True):
        times *= n * (n + 1) // 2 if row[0] == "partial" else 1
    torch.testing.assert_close(join_parts(parts, None, QUESTION), whole * times)
    for layout, _ in parts:
        assert DTensorLayout.from_json(as_json(layout)) == layout


def as_json(layout):
    return {
        "shape": list(layout.shape), "mesh": list(layout.mesh), "names": list(layout.names),
        "first": layout.first, "at": list(layout.at),
        "placements": [list(row) for row in layout.placements],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 8.0), ("avg", 4.0), ("max", 6.0), ("min", 2.0), ("product", 12.0)]
)
def test_partial_values_are_reduced_as_their_placement_says(op, expected):
    parts = list(
        zip(
            layouts([], [2], [("partial", op)]),
            [torch.tensor(2.0), torch.tensor(6.0)],
            strict=True,
        )
    )
    assert join_parts(parts, None, QUESTION) == expected


def test_the_wholes_of_several_meshes_are_joined_along_dim_alone():
    parts = [
        (layout, torch.full((1, 2), float(first + layout.at[0])))
        for first in (2, 0)
        for layout in layouts([2, 2], [2], [("shard", 0)], first)
    ]
    with pytest.raises(hl.AmbiguousError, match=r"2 meshes, from ranks 0, 2 on[\s\S]*dim=0"):
        join_parts(parts, None, QUESTION)
    assert join_parts(parts, 0, QUESTION)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_missing_part_and_a_part_of_another_shape_are_refused():
    first, second = layouts([4, 2], [2], [("shard", 0)])
    with pytest.raises(hl.RanksError, match=r"the part at \(1,\) of the mesh \[2\] is missing"):
        join_parts([(first, torch.zeros(2, 2))], None, QUESTION)
    parts = [(first, torch.zeros(3, 2)), (second, torch.zeros(1, 2))]
    with pytest.raises(hl.RanksError) as caught:
        join_parts(parts, None, QUESTION)
    assert "must have the shape [2, 2] by its placements, got [3, 2]." in str(caught.value)
    assert str(caught.value).endswith("suggest run.full('fc', dim=0).")
    outside = replace(first, at=())
    halves = [(first, torch.zeros(2, 2)), (second, torch.ones(2, 2)), (outside, torch.empty(0))]
    assert join_parts(halves, None, QUESTION).sum() == 4
    other = layouts([4, 2], [2], [("replicate",)])[1]
    with pytest.raises(hl.RanksError, match="layouts differ"):
        join_parts([(first, torch.zeros(2, 2)), (other, torch.zeros(4, 2))], None, QUESTION)


def test_the_guess_tells_parts_from_summands():
    first, second = layouts([4, 2], [2], [("unknown", "Odd()")])
    assert first.unjoinable_placement == "Odd()"
    whole = torch.zeros(4, 2)
    assert "may be summands" in guess_layout_text([(first, whole), (second, whole)], QUESTION)
    halves = [(first, torch.zeros(4, 1)), (second, torch.zeros(4, 1))]
    assert "dim=1" in guess_layout_text(halves, QUESTION)
    odd = [(first, torch.zeros(1, 1)), (second, torch.zeros(4, 1))]
    assert guess_layout_text(odd, QUESTION) == "The parts are [1, 1], [4, 1] of [4, 2]."


def test_reductions_that_are_unknown_or_mixed_are_named():
    (mixed, *_) = layouts([2], [1, 1], [("partial", "sum"), ("partial", "max")])
    assert mixed.unjoinable_placement == "Partial(max, sum)"
    assert layouts([2], [1], [("partial", "band")])[0].unjoinable_placement == "Partial(band)"


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1]}, {"shape": 3}, {"at": [2]}, {"at": [0, 0]}, {"placements": [["shard", 5]]},
        {"placements": [["shard"]]}, {"placements": [["odd"]]}, {"placements": ["shard"]},
        {"first": "0"}, {"mesh": [True]},
    ],
)  # fmt: skip
def test_data_that_is_no_layout_is_refused(change):
    sound = as_json(layouts([4], [2], [("shard", 0)])[0])
    assert DTensorLayout.from_json(sound) is not None
    with pytest.raises(ValueError, match="not the layout of a DTensor"):
        DTensorLayout.from_json({**sound, **change})
    assert DTensorLayout.from_json(True) is None
