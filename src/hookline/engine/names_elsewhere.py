"""Names of other packages, and how selectors write what they name."""

from __future__ import annotations

import re
from collections.abc import Container

from hookline.engine.function_names import functions_by_name

_LENS_NAME = re.compile(r"(?:blocks\.([^.]+)\.)?(?:attn\.|mlp\.)?(hook_)?(\w+)")
_LENS_PARTS = {"attn_scores": "scores", "pre": "mlp_pre", "post": "mlp_act"}
_PARTS = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "pattern", "scores"]
_SHORT_PARTS = ["embed", "pos_embed", "attn_in", "mlp_in", "q", "k", "v", "z", "mlp_pre", "mlp_act"]


def part_named_elsewhere(path: str, rest: str) -> str | None:
    """Advise on the part of a transformer that TransformerLens calls by a path.

    >>> part_named_elsewhere("blocks.0.hook_resid_pre", ":grad_output")
    " In a transformer, write '.resid_pre.0:grad_output' after hl.anatomy(model)."
    """
    match = _LENS_NAME.fullmatch(path)
    if match is None:
        return None
    layer, hook, name = match.groups()
    name = _LENS_PARTS.get(name, name) if hook else name
    if name not in _PARTS and not (hook and name in _SHORT_PARTS):
        return None
    part = f".{name}.{layer}" if layer and layer.isdecimal() else f".{name}"
    return f" In a transformer, write {part + rest!r} after hl.anatomy(model)."


def call_named_elsewhere(path: str, modules: Container[str]) -> str:
    """Advise on the call that torch.fx, as in torchvision's `create_feature_extractor`, so names.

    >>> call_named_elsewhere("layer1.0.add_1", ["layer1.0"])
    " A call of torch's add is 'layer1.0@add#1'."
    """
    above, dot, last = path.rpartition(".")
    name, _, number = last.rpartition("_") if re.search(r"_\d+$", last) else (last, "", "")
    module = f"{above}{dot}{name}"
    if number and module in modules:
        return f" A later call of it is {f'{module}#{number}'!r}."
    if above not in modules or name not in functions_by_name():
        return ""
    call = f"{above}@{name}#{number}" if number else f"{above}@{name}"
    return f" A call of torch's {name} is {call!r}."
