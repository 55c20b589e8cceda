"""The numbers of any tensor, flat and real: sparse, nested, quantised and complex ones, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hookline.engine import has_numbers, unwrap_all_transforms
from hookline.engine.pytree import describe
from hookline.errors import StructureError

# Tensors are read in chunks whose float64 copy takes at most 64 MiB.
CHUNK_NUMEL = 64 * 1024**2 // 8

# On a CPU, float32 adds up the squares of so many elements to six digits.
_SUMMED_NUMEL = 2**17

# Larger sparse tensors (1 GiB as dense float32) are not made dense.
DENSE_NUMEL = 2**28

ORDINARY = frozenset((Tensor, nn.Parameter))  # not a subclass such as a fake tensor


def numeric_strided_parts(value: Tensor) -> Iterable[Tensor]:
    """Return a value as strided tensors with numbers. In compiled code it is one tensor.

    Raises:
        StructureError: the value is no tensor, or is on the meta device or fake.
        RuntimeError: a sparse tensor is too large to be made dense.
    """
    if torch.compiler.is_compiling():
        return (value.detach(),)
    check_tensor(value)
    if (type(value) not in ORDINARY or value.is_meta) and not has_numbers(value):
        raise StructureError(
            f"the value of a statistic must have data, got {describe.in_full(value)}."
            '\nMove the model to a device before it runs: model.to_empty(device="cpu").'
        )
    return strided_parts(unwrap_all_transforms(value).detach())


def is_quantised(tensor: Tensor) -> bool:
    """Tell whether a tensor holds other numbers than it stands for, as one of torch or torchao."""
    return tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize


def strided_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor of any layout as strided tensors."""
    if tensor.is_nested:
        yield from tensor.unbind()
    elif is_quantised(tensor):
        yield tensor.dequantize()
    elif tensor.layout is not torch.strided:
        if tensor.numel() > DENSE_NUMEL:
            raise RuntimeError(
                f"a {str(tensor.layout).removeprefix('torch.')} tensor of {tensor.numel():,}"
                " elements is too large to be made dense"
            )
        yield tensor.to_dense()
    else:  # a view is negative that is the imaginary part of a conjugate
        yield tensor.resolve_neg() if tensor.is_neg() else tensor


def float64_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of any tensor in chunks of float64; for complex ones the magnitude.

    Raises:
        RuntimeError: torch cannot read the numbers, or a sparse tensor is too large.
    """
    for part in strided_parts(tensor.detach()):
        for chunk in view_chunks(part):
            yield to_real_float(chunk).to(torch.float64)


def view_chunks(tensor: Tensor, numel: int | None = None) -> Iterator[Tensor]:
    """Yield views of a tensor, split along its longest dimension until each is small enough.

    Args:
        tensor: a strided tensor.
        numel: the most elements of a view; None is `CHUNK_NUMEL`.
    """
    numel = CHUNK_NUMEL if numel is None else numel
    if tensor.numel() <= numel:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    n_parts = math.ceil(tensor.numel() / numel)
    for part in torch.split(tensor, max(tensor.shape[longest] // n_parts, 1), dim=longest):
        yield from view_chunks(part, numel)


def flat_chunks(tensor: Tensor, numel: int | None = None) -> Iterator[Tensor]:
    """Yield the elements of a strided tensor in flat chunks, in an order that needs no copy.

    Args:
        tensor: a strided tensor.
        numel: the most elements of a chunk; None is `CHUNK_NUMEL`.
    """
    tensor = in_memory_order(tensor)
    if tensor.is_contiguous():
        flat, numel = tensor.view(-1), CHUNK_NUMEL if numel is None else numel
        yield from torch.split(flat, numel) if len(flat) > numel else (flat,)
        return
    for chunk in view_chunks(tensor, numel):
        yield chunk.reshape(-1)


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of a strided tensor of float32 or float64.

    On a CPU, torch's norms and products add up a few long sums. In float32, those of a norm stand
    still at 1.7e7 times a square.
    """
    chunks = flat_chunks(tensor, _SUMMED_NUMEL if tensor.is_cpu else None)
    sums = [torch.dot(chunk, chunk) for chunk in chunks]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Permute a dense tensor, such as one in channels_last, so that it is contiguous."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def to_real_float(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 or float64 without loss; take the magnitude of complex numbers.

    Integers become float64, which holds those up to 2^53.
    """
    if tensor.device.type == "mps":  # MPS has no float64
        tensor = tensor.cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs()
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def to_float64(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64, on the CPU where its device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def negated_min_and_max(values: Tensor, is_finite: Tensor) -> Tensor:
    """Return the greatest -x and the greatest x of the finite numbers x, as float64."""
    signed = [torch.where(is_finite, side, -math.inf).amax() for side in (-values, values)]
    return torch.stack(signed).to(torch.float64)


def add_to_slots(slots: Tensor, sums: Tensor, extremes: Tensor) -> Tensor:
    """Return slots of sums and two extremes with other sums added, and the greater extremes."""
    return torch.cat([slots[:-2] + sums, torch.maximum(slots[-2:], extremes)])


class SumsAndExtremes:
    """A statistic of sums that add up, then the greatest -x and the greatest x; to inherit from."""

    n_slots: int
    takes_blocks = True

    def start(self, value: Tensor) -> Tensor:
        """Return empty slots on the value's device, which is not waited for."""
        slots = torch.zeros(self.n_slots, dtype=torch.float64, device=slot_device(value))
        slots[-2:].fill_(-math.inf)
        return slots

    def merge(self, slots: Tensor, other: Tensor) -> Tensor:
        """Add up two sets of slots."""
        check_slots(slots, self.n_slots)
        check_slots(other, self.n_slots)
        return add_to_slots(slots, other[:-2], other[-2:])


def check_tensor(value: object) -> None:
    """Refuse a value that is no tensor."""
    if not isinstance(value, Tensor):
        raise StructureError(
            f"the value of a statistic must be a tensor, got {describe.in_words(value)}."
            "\nGive one tensor, such as torch.as_tensor(value)."
        )


def check_slots(slots: object, n_slots: int | None) -> None:
    """Refuse slots that are not those of a statistic. Compiled code gets its own, unchecked.

    Args:
        slots: the slots.
        n_slots: their number; None where the value decides.
    """
    if torch.compiler.is_compiling():
        return
    if (
        not isinstance(slots, Tensor)
        or slots.dtype is not torch.float64
        or slots.dim() != 1
        or (n_slots is not None and slots.shape[0] != n_slots)
    ):
        size = "" if n_slots is None else f" of {n_slots} numbers"
        got = describe.in_full(slots) if isinstance(slots, Tensor) else describe.in_words(slots)
        raise StructureError(
            f"slots must be a flat float64 tensor{size}, as start and update return, got {got}."
            "\nBegin with slots = statistic.start(value), and keep those of each site apart."
        )


def slot_device(value: Tensor) -> torch.device:
    """Return the device for a value's slots: its own, or the CPU where float64 is missing.

    Raises:
        StructureError: the value is no tensor.
    """
    check_tensor(value)
    return torch.device("cpu") if value.device.type == "mps" else value.device
