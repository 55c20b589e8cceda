"""Keyword arguments of other packages, and what to write in hookline."""

from __future__ import annotations

import re
from collections.abc import Set

# Of torchinfo, wandb, baukit, TransformerLens, captum and grad-cam.
_ADVICE = {
    "layer_name layers names_filter return_nodes": "Give the modules as the selector.",
    "stop stop_at_layer": "hl.features(model, inputs, selector) stops after the last module.",
    "incl_bwd retain_grad": "Write ports=('output', 'grad_output').",
    "retain_input": "Write ports=('input', 'output').",
    "clone": "Write copy=True.",
    "pos_slice": "Write keep=lambda t: t[:, -1].",
    "pos position": "Write at=.",
    "edit_output fwd_hooks": "Write hl.edit(model, selector, change).",
    "baselines": "Give the baseline as inputs, and the inputs as clean=.",
    "log": "Write ports=('grad', 'value').",
    "log_freq": "Write every=100.",
    "input_data": "Write hl.summary(model, inputs).",
    "input_size": "Write hl.summary(model, torch.rand(1, 3, 224, 224)).",
    "col_names": "print(table) shows all columns, table.to_pandas() is a data frame.",
    "depth": "Write hl.summary(model, inputs).fold(2).",
    "target_layers": "Write layer=.",
    "targets": "Write target=, a class or one for each image.",
    "reshape_transform": "Write reshape=.",
    "aug_smooth eigen_smooth": "hl.cam smooths no maps.",
}
_ARGUMENT = re.compile(r"(\w+)=")


def advice_for_argument(name: str, arguments: Set[str]) -> str:
    """Advise on what to write in place of another package's argument; empty if none is known.

    >>> advice_for_argument("log_freq", {"model", "every"}), advice_for_argument("log_freq", set())
    ('Write every=100.', '')

    Args:
        name: the argument.
        arguments: those of the function here. Advice that names others is not for it.
    """
    for names, advice in _ADVICE.items():
        is_for_function = "hl." in advice or arguments >= set(_ARGUMENT.findall(advice))
        if name in names.split() and is_for_function:
            return advice
    return ""
