"""Operations that torch fuses: encoder layers, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.torch_private.graph.function_modes import has_torch_function_override


def may_run_fused(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch runs this encoder layer as one operation, if no module in it has a hook.

    The conditions are those that `nn.TransformerEncoderLayer.forward` checks.
    """
    arguments = dict(zip(("src", "src_mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    src = arguments.get("src")
    is_masked = any(
        arguments.get(name) is not None for name in ("src_mask", "src_key_padding_mask")
    )
    if not isinstance(src, Tensor) or (src.is_nested and is_masked):
        return False
    return _may_fuse_now(layer, src) and _fits_fused_op(layer)


def may_run_nested(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch hands this encoder's layers nested tensors, in place of padded ones.

    The conditions are those that `nn.TransformerEncoder.forward` checks.
    """
    names = ("src", "mask", "src_key_padding_mask")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    src, padding = arguments.get("src"), arguments.get("src_key_padding_mask")
    if not isinstance(src, Tensor) or not isinstance(padding, Tensor) or src.is_nested:
        return False
    return (
        getattr(encoder, "use_nested_tensor", False)
        and arguments.get("mask") is None
        and _may_fuse_now(encoder.layers[0], src)
        and (not getattr(encoder, "mask_check", True) or _is_right_padding(padding))
    )


def _may_fuse_now(layer: nn.Module, src: Tensor) -> bool:
    """Tell whether torch may run a layer as one operation on this input."""
    tensors = [src, *layer.parameters()]
    needs_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not torch.is_autocast_enabled()
        and not needs_graph
        and not layer.training
        and src.dim() == 3
        and not has_torch_function_override(tensors)
    )


def _is_right_padding(padding: Tensor) -> bool:
    """Tell whether a mask marks padding at the end of each row alone."""
    is_padded = (padding != 0).int()
    return bool((is_padded.cummax(-1).values == is_padded).all())


def _fits_fused_op(layer: nn.TransformerEncoderLayer) -> bool:
    """Tell whether an encoder layer has the form that torch's fused operation takes."""
    attention: Any = layer.self_attn
    return bool(
        type(layer).forward is nn.TransformerEncoderLayer.forward
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
    )
