"""Name what lies inside attention, MLP and mixtures of experts, and claim what proves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import parse_site, paths_above
from hookline.statistics.flat_numbers import to_float64
from hookline.verbs.anatomy.identities import CLOSE, NO_SITE, relative_error, rescale_fit_error
from hookline.verbs.anatomy.parts import (
    Layer,
    Part,
    argument_of,
    input_and_output,
    input_site,
    output_site,
    why_no_part,
)
from hookline.verbs.anatomy.residual_stream import MATMULS, values_on_every_path, walk_back
from hookline.verbs.anatomy.trace import Event, ModuleCall, Trace, Value, replay_by_token

_SLICES = {"chunk", "split", "getitem", "narrow", "unbind", "view", "reshape", "transpose", "add"}
_PRODUCTS = {"mul", "mul_", "imul", "rmul"}
_MLP = ("mlp_pre", "mlp_gate", "mlp_up", "mlp_act")
_EXPERTS = ("router_logits", "expert_weights", "expert_indices", "expert_out")
_IN_CORE = ("q", "k", "v", "scores", "pattern", "z")
_AROUND_CORE = ("attn_gate", "q_norm", "k_norm", "attn_heads")


def _matmuls(part: Part) -> list[Event]:
    return [event for event in part.term.events if event.name in MATMULS]


def _first_event_index(part: Part) -> int:
    """Return the number of the first call of a part."""
    return part.term.events[0].index if part.term.events else 0


def _walk_back_to_matmuls(value: Value, part: Part) -> tuple[list[Event], list[Value]]:
    """Return the calls that lead from the last products to a value, and what these return."""
    stop = [id(output) for event in _matmuls(part) for output in event.outputs]
    stop += [id(read) for read in part.term.reads]
    return ([], [value]) if id(value) in stop else walk_back(value, stop, _first_event_index(part))


def name_mlp(trace: Trace, layer: Layer) -> None:
    """Name the neurons of a layer's MLP."""
    names, parts = layer.names, layer.parts_of_kind("mlp")
    if len(parts) != 1:
        return names.refuse(_MLP, f"the block has no single MLP{why_no_part(layer, 'mlp')}")
    if find_experts_call(trace, layer) is not None:
        return names.refuse(_MLP, "the MLP is of experts")
    part = parts[0]
    products = _matmuls(part)
    if not products or len(products[-1].varying) != 1:
        return names.refuse(_MLP, "no products lead in and out of its neurons")
    act = products[-1].varying[0].origin
    pre, up = _pre_activation_and_up_projection(act, part)
    if pre is None:
        return names.refuse(_MLP, "no function of one value makes the neurons")
    if _has_second_mlp(part, act, products[-1]):
        return names.refuse(_MLP, "it also adds a product of other neurons, as a second MLP does")
    values = {"mlp_pre": pre} if up is None else {"mlp_pre": pre, "mlp_gate": pre, "mlp_up": up}
    sites = {name: output_site(trace, value, layer.block.path) for name, value in values.items()}
    sites["mlp_act"] = input_site(trace, products[-1].varying[0], layer.block.path, products[-1:])
    if None in sites.values():
        return names.refuse(_MLP, NO_SITE)
    if up is None:
        names.refuse(("mlp_gate", "mlp_up"), "the MLP has no gate")
    for name, site in sites.items():
        names.add_or_refuse(name, site)
    given = [pre] if up is None else [pre, up]
    events, _ = walk_back(act, map(id, given), _first_event_index(part))
    needed = [sites[name] for name in ("mlp_act", "mlp_pre", "mlp_up") if name in sites]
    return names.add_claim(
        "act(pre) * up", sites, needed, partial(_neuron_replay_error, events, given, act)
    )


def _has_second_mlp(part: Part, act: Value, last: Event) -> bool:
    """Tell whether a part adds a product of products that pass the neurons by."""
    events, _ = walk_back(part.term.value, [id(act), *map(id, part.term.reads)], 0)
    products = [event for event in events if event.name in MATMULS and event is not last]
    made = {id(output) for event in products for output in event.outputs}
    for event in events:
        if event not in products and any(id(value) in made for value in event.varying):
            made.update(map(id, event.outputs))
    return any(id(value) in made for event in products for value in event.varying)


def _pre_activation_and_up_projection(act: Value, part: Part) -> tuple[Value | None, Value | None]:
    """Return what the nonlinearity gets, and the linear factor of a gated MLP."""
    events, heavy = _walk_back_to_matmuls(act, part)
    event = act.maker
    factors = event.varying if event is not None and event.name in _PRODUCTS else []
    if len(factors) == 2:
        linear = [factor for factor in factors if _is_linear_output(factor, part)]
        curved = [factor for factor in factors if not _is_linear_output(factor, part)]
        if len(linear) == 1 and len(_walk_back_to_matmuls(curved[0], part)[1]) == 1:
            own = _pre_activation(curved[0], part)
            other = _pre_activation(linear[0], part)
            if own is not other:
                return own, other
    return (_pre_activation(act, part) if events and len(heavy) == 1 else None), None


def _is_linear_output(value: Value, part: Part) -> bool:
    events, _ = _walk_back_to_matmuls(value, part)
    return all(_is_slice_or_view(event) for event in events)


def _is_slice_or_view(event: Event) -> bool:
    if any(value.like is not None for value in event.outputs):
        return True
    return event.name in _SLICES and len(event.varying) == 1


def _pre_activation(value: Value, part: Part) -> Value:
    """Return the last value before a nonlinearity that is a part of what one product returns."""
    events, heavy = _walk_back_to_matmuls(value, part)
    values = [*heavy, *(output for event in events for output in event.outputs)]
    used = {id(value)}
    for event in reversed(events):
        if any(id(output) in used for output in event.outputs):
            used.update(id(source) for source in event.varying)
    gates = values_on_every_path([each for each in values if id(each) in used], value)
    pre = gates[0]
    for gate in gates[1:]:
        is_curved = gate is value and not _is_linear_output(value, part)
        if gate.maker is None or not _is_slice_or_view(gate.maker) or is_curved:
            break
        pre = gate
    return pre


def _neuron_replay_error(
    events: list[Event], given: list[Value], wanted: Value, act: Tensor, *numbers: Tensor
) -> float:
    """Return the error of computing the neurons again, from their own pre-activations alone.

    Moving all neurons by one place must move the result by one place, and doubling the linear
    factor must double it.
    """

    def again(*values: Tensor) -> Tensor:
        return replay_by_token(events, list(zip(given, values, strict=True)), wanted)

    moved = [number.roll(1, -1) for number in numbers]
    errors = [relative_error(again(*numbers), act), relative_error(again(*moved), act.roll(1, -1))]
    if len(numbers) == 2:
        errors.append(relative_error(again(numbers[0], 2 * numbers[1]), 2 * act))
    return max(errors)


# -- mixtures of experts --------------------------------------------------------------------------


def find_experts_call(trace: Trace, layer: Layer) -> tuple[ModuleCall, Value, Value] | None:
    """Return the call of a layer's experts, the indices and the weights that it gets."""
    inside = f"{layer.block.path}."
    for path, calls in trace.calls.items():
        if not path.startswith(inside) or len(calls) != 1:
            continue
        values = calls[0].inputs.values()
        indices = [v for v in values if v.tensor.dtype in (torch.int64, torch.int32)]
        for index in indices:
            weights = [
                v for v in values
                if v.tensor.is_floating_point() and v.tensor.shape == index.tensor.shape
                and v.tensor.dim() > 1
            ]  # fmt: skip
            if weights and not index.is_constant and calls[0].outputs:
                return calls[0], index, weights[0]
    return None


def name_experts(trace: Trace, layer: Layer, model: nn.Module) -> None:
    """Name the router and the experts of a layer."""
    call, names = find_experts_call(trace, layer), layer.names
    parts = layer.parts_of_kind("mlp")
    if call is None or len(parts) != 1:
        why = "no module of the block gets the indices and the weights of experts"
        return names.refuse(_EXPERTS, why)
    experts, indices, weights = call
    floating = [value for value in experts.inputs.values() if value.tensor.is_floating_point()]
    hidden = next(value for value in floating if value is not weights)
    given = [_site_of_call_input(trace, experts, value) for value in (hidden, indices, weights)]
    output = output_site(trace, next(iter(experts.outputs.values())), layer.block.path)
    if output is None or None in given:
        return names.refuse(_EXPERTS, NO_SITE)
    own = {"expert_indices": given[1], "expert_weights": given[2], "expert_out": output}
    for name, site in own.items():
        names.add_or_refuse(name, site)
    leaves = {id(value): leaf[0] if leaf else 0 for leaf, value in experts.inputs.items()}
    keys = [leaves[id(value)] for value in (hidden, indices, weights)]
    module, order = model.get_submodule(experts.path), list(leaves.values())
    measure = partial(_weighted_expert_sum_error, module, keys, order)
    names.add_claim("sum of weight * expert", own, [output, *given], measure)
    return _name_router(trace, layer, parts[0], indices)


def _name_router(trace: Trace, layer: Layer, part: Part, indices: Value) -> None:
    """Name the logits from which the experts are chosen."""
    n_experts = 1 + int(indices.tensor.max())
    reads = list(map(id, part.term.reads))
    events, _ = walk_back(indices, reads, layer.block.call.begin)
    made = [(event, event.outputs[0]) for event in events if event.name in MATMULS]
    products = [pair for pair in made if pair[1].tensor.shape[-1] >= n_experts]
    if not products:
        layer.names.add_or_refuse(
            "router_logits", None, "no product makes a number for each expert"
        )
        return
    product, logits = products[-1]
    late, _ = walk_back(indices, [id(logits), *reads], product.index + 1)
    site = output_site(trace, logits, layer.block.path)
    holder = None if site is None else parse_site(site).path
    if late and holder in (late[0].path, *paths_above(late[0].path)):
        # This module returns the logits beside its choice: an edit of them would choose no other.
        site = next(
            iter(trace.sites_of_kind(logits, "operation", f"{product.path}@{product.name}")), None
        )
    if not layer.names.add_or_refuse("router_logits", site, NO_SITE):
        return
    needed = [layer.names.sites["expert_indices"], site]
    measure = partial(_expert_choice_error, late, logits, indices)
    layer.names.add_claim("choice by the logits", ("router_logits",), needed, measure)


def _site_of_call_input(trace: Trace, call: ModuleCall, value: Value) -> str | None:
    return next(iter(trace.sites_of_kind(value, "input", call.path)), None)


def _weighted_expert_sum_error(
    module: nn.Module, keys: Sequence[Any], order: Sequence[Any], out: Tensor, *given: Tensor
) -> float:
    """Return how far the experts' output is from a sum over the chosen experts by weight."""
    hidden, indices, weights = given

    def run(chosen: Tensor, by: Tensor) -> Tensor:
        values = dict(zip(keys, (hidden, chosen, by), strict=True))
        # The order of the call; a decorated forward may know its arguments by other names.
        result = module(*[values[key] for key in order]) if len(order) == 3 else module(**values)
        return result if isinstance(result, Tensor) else result[0]

    parts = [
        run(indices[..., k : k + 1].contiguous(), weights[..., k : k + 1].contiguous())
        for k in range(indices.shape[-1])
    ]
    return max(
        relative_error(torch.stack(parts).sum(0), out),
        relative_error(run(indices, 2 * weights), 2 * out),
    )


def _expert_choice_error(
    events: list[Event], start: Value, wanted: Value, indices: Tensor, logits: Tensor
) -> float:
    chosen = replay_by_token(events, [(start, logits)], wanted)
    same = chosen.sort(-1)[0].flatten() == indices.sort(-1)[0].flatten()
    return float(to_float64(~same).mean())


# -- attention ------------------------------------------------------------------------------------


def name_attention(trace: Trace, layer: Layer) -> None:
    """Name the pattern, its values by head, the gate and the norms of queries and keys."""
    names, parts = layer.names, layer.parts_of_kind("attention")
    why = _why_no_single_pattern(layer, parts)
    if why:
        names.refuse((*_IN_CORE, *_AROUND_CORE), why)
        return
    core, values = parts[0].cores[0]
    sites = {name: f"{core.path}@{name}" for name in _IN_CORE}
    names.sites.update(sites)
    names.add_claim(
        "pattern @ v", sites, [sites["z"], sites["pattern"], sites["v"]], _pattern_times_v_error
    )
    names.add_claim("q @ k", ("q", "k"), [sites[k] for k in ("scores", "q", "k")], _scores_error)
    names.add_claim("softmax(scores)", sites, [sites["pattern"], sites["scores"]], _softmax_error)
    if values is not None:
        layer.n_value_heads = _n_value_heads(layer, parts[0], values)
    for name_around in (_name_attention_gate, _name_merged_heads, _name_query_and_key_norms):
        name_around(trace, layer, parts[0], core)


def _why_no_single_pattern(layer: Layer, parts: list[Part]) -> str:
    """Say why the attentions of a block have no pattern or several; "" for one pattern."""
    if len(parts) == 1:
        n_cores = len(parts[0].cores)
        return f"{n_cores} patterns mix tokens in the attention" if n_cores > 1 else ""
    none, mixer = why_no_part(layer, "attention"), layer.names.sites.get("mixer_out")
    if not parts and not none and mixer is not None:
        none = f"; what mixes tokens in it, mixer_out ({mixer}), shows no softmax"
    return f"the block has no single attention{none}"


def _n_value_heads(layer: Layer, part: Part, values: Value) -> int:
    """Return how many heads the values have before they are repeated for the heads of queries.

    Where the axis of the heads is depends on the code: the numbers by token and head are counted.
    The function of nn.MultiheadAttention is told.
    """
    core = part.cores[0].call
    if core.name == "multi_head_attention_forward":
        return int(argument_of(core, 4, "num_heads"))
    events, _ = _walk_back_to_matmuls(values, part)
    width = values.tensor.shape[-1]
    sizes = [
        each.tensor.numel()
        for each in (values, *(output for event in events for output in event.outputs))
        if each.tensor.dim() > 1 and each.tensor.shape[-1] % width == 0
    ]
    n_heads, rest = divmod(min(sizes), layer.block.pre.tensor[..., 0].numel() * width)
    return 0 if rest else n_heads


def _name_merged_heads(trace: Trace, layer: Layer, part: Part, core: Event) -> None:
    """Name what the output projection gets: z of all heads side by side, gated where it is."""
    product, names = _matmuls(part)[-1], layer.names
    merged = product.varying[0] if len(product.varying) == 1 and product is not core else None
    site = None
    if merged is not None and product.path != core.path:
        site = input_site(trace, merged, layer.block.path, [product])
    if site is None:
        return names.refuse(["attn_heads"], "no module gets the heads side by side")
    if input_and_output(part.term)[1].origin is not product.outputs[0].origin:
        why = f"the attention returns more than what {product.path} does"
        return names.refuse(["attn_heads"], why)
    names.add_or_refuse("attn_heads", site)
    layer.projection = product.path
    needed = [
        site,
        *(names.sites[name] for name in ("z", "attn_gate") if name in names.sites),
    ]
    return names.add_claim("z by head, side by side", ("attn_heads",), needed, _merged_heads_error)


def _merged_heads_error(merged: Tensor, z: Tensor, gate: Tensor | None = None) -> float:
    heads = z.transpose(-3, -2).reshape(*z.shape[:-3], z.shape[-2], -1)
    if gate is not None and gate.numel() == heads.numel():
        heads = heads * gate.reshape(heads.shape)
    return relative_error(heads, merged)


def _name_attention_gate(trace: Trace, layer: Layer, part: Part, core: Event) -> None:
    mixed = {id(value) for value in core.outputs}
    for event in part.term.events:
        if event.index <= core.index or not any(id(value) in mixed for value in event.inputs):
            continue
        other = [value for value in event.varying if id(value) not in mixed]
        if event.name in _PRODUCTS and len(other) == 1 and len(event.varying) == 2:
            mine = next(value for value in event.varying if id(value) in mixed)
            values = event.outputs[0], mine, other[0]
            sites = [output_site(trace, value, layer.block.path) for value in values]
            if None in sites:
                break
            layer.names.add_or_refuse("attn_gate", sites[2])
            return layer.names.add_claim(
                "z * gate", ("attn_gate",), sites, _elementwise_product_error
            )
        mixed.update(id(value) for value in event.outputs)
    return layer.names.refuse(["attn_gate"], "nothing multiplies z before the last product")


def _pattern_times_v_error(z: Tensor, pattern: Tensor, v: Tensor) -> float:
    if v.dim() != pattern.dim() or v.shape[-2] != pattern.shape[-1]:
        return float("inf")
    groups = pattern.shape[-3] // v.shape[-3]
    return relative_error(pattern @ v.repeat_interleave(groups, -3), z)


def _scores_error(scores: Tensor, q: Tensor, k: Tensor) -> float:
    """Return the error of scale * q @ k, capped or not, and with a bias of the positions or not."""
    if k.dim() != q.dim() or k.shape[-1] != q.shape[-1] or q.shape[-3] % k.shape[-3]:
        return float("inf")
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    product = to_float64(q) @ to_float64(k).transpose(-1, -2)
    target = to_float64(scores)
    if product.shape != target.shape:
        return float("inf")
    is_seen = target > -9e3  # a mask leaves the others out
    pairs = [(product[is_seen], target[is_seen])]
    pairs.append((_center_rows(product, is_seen), _center_rows(target, is_seen)))
    if len(target) > 1:
        twice = is_seen[0] & is_seen[-1]
        pairs.append(((product[0] - product[-1])[twice], (target[0] - target[-1])[twice]))
    worst = min(_scale_fit_error(x, y) for x, y in pairs)
    return worst if worst < CLOSE else min(worst, _softcap_fit_error(*pairs[0]))


def _center_rows(values: Tensor, is_seen: Tensor) -> Tensor:
    """Return the seen values less their mean in each row: a softmax does not see the mean."""
    seen = values.where(is_seen, 0.0)
    mean = seen.sum(-1, keepdim=True) / is_seen.sum(-1, keepdim=True).clamp(min=1)
    return (values - mean)[is_seen]


def _scale_fit_error(x: Tensor, y: Tensor) -> float:
    """Return the error of the best factor."""
    return relative_error((x @ y) / (x @ x).clamp(min=1e-30) * x, y)


def _softcap_fit_error(x: Tensor, y: Tensor) -> float:
    """Return the error of the best cap * tanh(scale * x / cap)."""
    largest = float(y.abs().max())

    def off(exponent: float) -> float:
        cap = largest * (1 + 10**exponent)
        return _scale_fit_error(x, cap * torch.atanh(y / cap))

    low, high = -9.0, 3.0
    for _ in range(80):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if off(first) < off(second) else (first, high)
    return off(low)


def _softmax_error(pattern: Tensor, scores: Tensor) -> float:
    """Return the error of the softmax; a sink leaves rows that sum to less than 1."""
    computed = torch.nan_to_num(to_float64(scores).softmax(-1))
    return relative_error(computed * to_float64(pattern).sum(-1, keepdim=True), pattern)


def _elementwise_product_error(out: Tensor, first: Tensor, second: Tensor) -> float:
    return relative_error(first * second, out) if first.dim() == second.dim() else float("inf")


def _name_query_and_key_norms(trace: Trace, layer: Layer, part: Part, core: Event) -> None:
    names = layer.names
    for name, value in zip(("q_norm", "k_norm"), _query_and_key(part, core), strict=False):
        events, _ = _walk_back_to_matmuls(value, part)
        made = {id(output) for event in events for output in event.outputs}
        for path, calls in trace.calls.items():
            if not path.startswith(f"{core.path}.") or len(calls) != 1:
                continue
            for before_norm, after_norm in _values_around_norms(calls[0], made):
                names.add_or_refuse(name, trace.sites_of_kind(after_norm, "output", path)[0])
                needed = [
                    names.sites[name],
                    _site_of_call_input(trace, calls[0], before_norm),
                ]
                names.add_claim("norm", (name,), needed, rescale_fit_error)
    lacking = [name for name in ("q_norm", "k_norm") if name not in names.sites]
    names.refuse(lacking, "no module normalises it between its product and the scores")


def _values_around_norms(call: ModuleCall, wanted_ids: set[int]) -> Iterator[tuple[Value, Value]]:
    """Yield the values before and after each norm that a module computes of its inputs."""
    for output, source in zip(call.outputs.values(), call.inputs.values(), strict=False):
        is_other = id(output) in wanted_ids and output.origin is not source.origin
        if is_other and rescale_fit_error(output.tensor, source.tensor) < 1e-4:
            yield source, output


def _query_and_key(part: Part, core: Event) -> list[Value]:
    if core.name == "scaled_dot_product_attention":
        return [argument_of(core, 0, "query"), argument_of(core, 1, "key")]
    if part.softmax is None:
        return []
    stop = [id(read) for read in part.term.reads]
    events, _ = walk_back(part.softmax.varying[0], stop, 0)
    scores = [event for event in events if event.name in MATMULS and len(event.varying) > 1]
    return scores[-1].varying[-2:] if scores else []
