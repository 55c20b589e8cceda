"""Tell which dimension of a value has its channels, or features."""

from __future__ import annotations

import re

# The names of modules whose channels come before the places: not ConvBertLayer, not Conv1D.
_CHANNELS_FIRST = re.compile(
    r"(Conv|BatchNorm|InstanceNorm|MaxPool|AvgPool|Adaptive|LPPool)\w*\dd|GroupNorm"
)
_OF_A_PICTURE = (4, 5)  # dimensions, those of a volume included


def channel_dim(n_dims: int, module_type: str) -> int | None:
    """Return the dimension of channels: that of the module, or 1 of pictures, or the last one.

    Args:
        n_dims: the number of dimensions of the value.
        module_type: the class of the module that returned it.

    Returns:
        The dimension; None for a value without channels.
    """
    if n_dims < 2:
        return None
    if _CHANNELS_FIRST.match(module_type):
        is_without_batch = f"{n_dims - 1}d" in module_type and module_type != "BatchNorm1d"
        return 0 if is_without_batch else 1
    if module_type == "Linear" or module_type.endswith(("LayerNorm", "RMSNorm")):
        return n_dims - 1
    return 1 if n_dims in _OF_A_PICTURE else n_dims - 1
