"""Compare two runs of one model, or of a model and its port, and say where they part."""

from __future__ import annotations

from typing import Any

from hookline.errors import InputError
from hookline.verbs.compare.common_items import find_data_differences, take_common_items
from hookline.verbs.compare.compare_by_token import align_sides
from hookline.verbs.compare.comparison import Comparison
from hookline.verbs.compare.join_ranks import Dims, check_dims, check_dims_match
from hookline.verbs.compare.judge import Judge
from hookline.verbs.compare.pair_by_name import Names, pair_entries
from hookline.verbs.compare.read_sides import read_both_sides
from hookline.verbs.compare.setup_findings import (
    find_coarse_floors,
    find_dtype_and_shape_differences,
    find_input_differences,
    find_model_differences,
    find_setting_differences,
    find_token_remarks,
    find_unpaired,
)

# What goes together. Arrays of another framework may stand for a recording.
_TOGETHER = ({"recording", "arrays"}, {"store"}, {"curves"})


def compare(
    a: Any,
    b: Any,
    *,
    names: Names | None = None,
    floor: Comparison | None = None,
    tokens: Any = "auto",
    dims: Dims | None = None,
) -> Comparison:
    """Compare two runs site by site, and name the first that differs beyond rounding.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
        >>> port = nn.Sequential(nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 2))
        >>> _ = port.load_state_dict(model.state_dict())
        >>> x = torch.randn(4, 8)
        >>> with hl.record(model, ["**", "(root):input"]) as run:
        ...     _ = model(x)
        >>> with hl.record(port, ["**", "(root):input"]) as ported:
        ...     _ = port(x)
        >>> hl.compare(ported, run).first.site
        '1'

    The two may come from other processes, machines, dtypes and frameworks. Recordings need one
    forward on equal inputs. Record the inputs too, so that a difference in them is told before any
    layer is blamed; with `ports=("input", "output")`, a module is told from what feeds it.

    Four numbers of each pair decide together: the relative error, the ratio of norms, the worst row
    and the worst element. A pair is noise if each is below the noise floor. Values are read one
    pair at a time, and measured in float64.

    Args:
        a: a recording or one of its passes, a store, the curves of a monitor, a dict of arrays such
            as a state dict, or the path of one of these (a folder or its URL, `.npz`, `.npy`,
            `.safetensors`, `.pt`). Arrays may be of torch, NumPy, or anything that NumPy converts,
            such as nested lists.
        b: the same kind of thing, which numbers are relative to: the reference. A dict of arrays
            may be compared with a recording; its names are those of the sites. Curves are compared
            at their common steps; of a step that comes twice, the last number counts.
        names: renames modules or arrays of b to those of a: a function from a path to a path, or a
            dict `{path in b: path in a}`. A dict also renames what lies below a path: with
            `{"": "body"}`, all of b is compared with the module `body` of a.
        floor: a comparison of two runs that only rounding tells apart, with the sites of a:
            `hl.compare(run, run_in_float64)`. Four times what it measured is noise; where it
            measured none, the values must be equal. None takes the floors of the dtypes, which are
            wider. Where a GPU multiplied in TF32, they are those of float16; a finding names what
            ends that.
        tokens: which rows and tokens of two recordings are the same. "auto" reads it from the
            recorded inputs of the model: `input_ids`, `attention_mask`, `position_ids`,
            `cu_seqlens`, the length of the cache. So a sequence alone is compared with its row of a
            batch, left with right padding, packed with padded sequences, and passes with a cache
            with one pass. If inputs were not recorded, give them by these names: a dict for both
            sides, or a tuple of two; for a side with several passes, a list with a dict for each.
            None compares the values as they are.
        dims: how to join plain tensors in a folder of several ranks: the dimension along which they
            are concatenated, such as 0 if each rank has a part of the batch; "sum" of partial sums,
            or "mean", "max" or "min"; or a dict of these by globs of sites,
            `{"**.q_proj": -1, "**.o_proj:input": -1}`, of which the last that matches counts.
            DTensors need none, and no copies: each rank's is compared. Ranks whose recorded inputs
            differ need no dimension of the batch: their rows are aligned. Values are then joined
            among the ranks with equal inputs.

    Returns:
        The comparison: `first`, `suspect`, `findings`, `rows`; it prints as a table.

    Raises:
        InputError: a side cannot be compared, is empty, or is of another kind than the other; no
            name is in both; or `names`, `floor`, `tokens` or `dims` is invalid.
        FolderError, ModelError: a folder or a file cannot be read.
    """
    if floor is not None and not isinstance(floor, Comparison):
        raise InputError(
            f"floor must be a Comparison, got {type(floor).__name__}."
            "\nGive floor=hl.compare(run, run_in_float64)."
        )
    return compare_with_unpaired(a, b, names, floor, tokens, dims)[0]


def compare_with_unpaired(
    a: Any,
    b: Any,
    names: Names | None = None,
    floor: Comparison | None = None,
    tokens: Any = "auto",
    dims: Dims | None = None,
) -> tuple[Comparison, dict[str, list[str]]]:
    """Compare two runs, and list the sites of the values that are in a or in b alone."""
    check_dims(dims)
    side_a, side_b = read_both_sides(a, b, dims, names)
    if not any({side_a.noun, side_b.noun} <= kinds for kinds in _TOGETHER):
        raise InputError(
            f"a and b must be the same kind of thing, got {_with_article(side_a.noun)} and"
            f" {_with_article(side_b.noun)}."
            "\nGive two recordings, two stores, two curves or two dicts of arrays."
        )
    check_dims_match(dims, [*side_a.rank_sites, *side_b.rank_sites])
    (side_a, side_b), about_items = take_common_items(side_a, side_b)
    (side_a, side_b), alignment, why = align_sides(side_a, side_b, tokens, dims)
    pairing = pair_entries(side_a, side_b, names)
    judge = Judge(floor, pairing, alignment)
    rows = judge.judge_pairs(side_a, side_b)
    if not rows:
        raise InputError(
            "a and b must have numbers in common, got"
            f" {pairing.pairs[0][0].key} without a tensor in both.\nRecord sites with tensors."
        )
    input_keys = {a.key for a, b in pairing.pairs if a.is_input or b.is_input}
    inputs = [row for row in rows if judge.entry_of[row.site].key in input_keys]
    suspect, first = judge.find_suspect(rows)
    does_differ = any(row.verdict == "differs" for row in rows)
    about_tokens = find_token_remarks(alignment, why, judge.partial, does_differ=does_differ)
    if any(remark.kind == "inputs" for remark in about_tokens):
        suspect = None  # the inputs are
    eps = max(judge.eps, judge.coarsest)
    modes, rest = find_setting_differences(side_a, side_b) if does_differ else ([], [])
    findings = [
        *modes,
        *(find_input_differences(inputs) if "recording" in (side_a.noun, side_b.noun) else ()),
        *about_items,
        *(find_data_differences(side_a, side_b) if does_differ else ()),
        *about_tokens,
        *find_model_differences(side_a, side_b, does_differ=does_differ),
        *rest,
        *find_unpaired(pairing, judge.alone),
        *find_dtype_and_shape_differences(rows),
        *(first if does_differ else find_coarse_floors(eps, rows, judge.tf32_flags)),
    ]
    return Comparison(rows, findings, suspect), judge.alone


def _with_article(noun: str) -> str:
    return f"{'a ' * (not noun.endswith('s'))}{noun}"
