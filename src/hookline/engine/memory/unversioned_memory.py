"""Memory that may change while torch's version counter does not.

A tensor's `_version` counts every in-place operation that goes through torch's dispatcher. It does
not count collectives, running statistics that a kernel updates, fused optimizers and replays of
CUDA graphs. These write to parameters and buffers, and in a job of several ranks, or in a process
where compiled code makes CUDA graphs, to any tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine.passes.modes import has_numbers, unwrap_all_transforms
from hookline.engine.pytree.tree import parts_of_wrapper
from hookline.engine.torch_private.distributed import is_distributed_job, is_dtensor
from hookline.engine.torch_private.graph.compiler_state import may_use_cudagraph_memory
from hookline.engine.torch_private.modules import own_parameters, tensor_tables
from hookline.util.weak_map import WeakIdentityMap

# fmt: off
_COMPUTING = frozenset(kind.forward for kind in (
    nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d, nn.BatchNorm1d, nn.Embedding, nn.EmbeddingBag, nn.GELU, nn.GroupNorm,
    nn.InstanceNorm1d, nn.LayerNorm, nn.Linear, nn.RMSNorm, nn.Sigmoid, nn.Softmax, nn.Tanh,
))
_COMPRESSED = frozenset(
    {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
_PLAIN = frozenset({Tensor, nn.Parameter})
# Memory is compared by cache lines of 64 bytes. Plain addresses are all multiples of 64, so they
# would collide in a set, which makes look-ups ten times slower. If one of two tensors on a line is
# unversioned, both count as unversioned, which costs a copy.
CACHE_LINE_BITS = 6
# fmt: on


def returns_new_memory(kind: type[nn.Module]) -> bool:
    """Tell whether a class's forward returns no memory of a parameter or an input."""
    return getattr(kind, "forward", None) in _COMPUTING


_EVERYTHING = range(1 << 64)  # all memory


@final
class UnversionedMemory:
    """The memory of a model that may change without a version counter.

    This memory is that of the model's parameters and buffers. With sharded weights, in a process
    group of several ranks, or with CUDA graphs of compiled code, it is all memory.

    Args:
        root: the model, which is not held; None without a model.
        n_modules: the number of the model's modules.
    """

    __slots__ = ("_n_modules", "_root", "_seen")

    def __init__(self, root: nn.Module | None, n_modules: int) -> None:
        self._root = None if root is None else weakref.ref(root)
        self._n_modules = n_modules
        self._seen: tuple[int, Container[int]] = -1, ()

    def begin_pass(self, current: Any) -> bool:
        """Note in a pass that all memory is unversioned, and tell whether it is."""
        if not may_use_cudagraph_memory() and not is_distributed_job(self._model()):
            return False
        current.unversioned = _EVERYTHING
        return True

    def contains(self, current: Any, tensor: Tensor) -> bool:
        """Tell whether the memory of a tensor of this pass may change without its version."""
        unversioned = current.unversioned
        if unversioned is None:
            unversioned = self.cache_lines(current)
        # FSDP gathers parameters in its own memory, and another model's parameter is trained, too.
        if type(tensor) is not Tensor and (isinstance(tensor, nn.Parameter) or is_dtensor(tensor)):
            return True
        return _is_on_lines(tensor, unversioned)

    def cache_lines(self, current: Any) -> Container[int]:
        """Look up the unversioned cache lines of this pass: `address >> CACHE_LINE_BITS`.

        Once a pass, only a sample of the parameters is checked for having moved. A check of all
        parameters would take longer than a small model. If only other parameters have moved,
        `contains_any_now` finds it.
        """
        if may_use_cudagraph_memory():  # since this pass has begun
            current.unversioned = _EVERYTHING
            return _EVERYTHING
        model = self._model()
        memory = _Memory() if model is None else _memories.get_or_add(model, _Memory)
        if memory.n_modules != self._n_modules or memory.has_moved():
            memory.read_lines(model, self._n_modules)
        current.unversioned = memory.lines
        return memory.lines

    def contains_any_now(self, tensors: Sequence[Tensor], n_passes: int) -> bool:
        """Tell whether any of these tensors lies in unversioned memory now.

        Jobs of several ranks are left out, because every value there was copied in time.

        Args:
            tensors: the tensors.
            n_passes: the number of passes begun; the memory is looked up again when it changes.
        """
        if self._seen[0] != n_passes:
            now = _Memory()
            now.read_lines(self._model(), self._n_modules)
            self._seen = n_passes, now.lines
        memory = self._seen[1]
        return any(map(_is_on_lines, tensors, repeat(memory)))

    def _model(self) -> nn.Module | None:
        return None if self._root is None else self._root()


def _is_on_lines(tensor: Tensor, tracked: Container[int]) -> bool:
    if type(tensor) is Tensor:
        try:
            return tensor.untyped_storage().data_ptr() >> CACHE_LINE_BITS in tracked
        except RuntimeError:  # a sparse tensor, or a tensor of a transform
            pass
    return any(address in tracked for address in first_cache_lines(tensor))


def first_cache_lines(tensor: Tensor) -> Iterator[int]:
    """Yield the cache line where a tensor begins; for a wrapper, those of all tensors inside."""
    if is_lazy(tensor):
        return  # a lazy parameter has no memory before its module's first run
    tensor = unwrap_all_transforms(tensor)
    if parts := parts_of_wrapper(tensor):
        for part in parts:
            yield from first_cache_lines(part)
    elif tensor.layout is torch.sparse_coo:
        yield from first_cache_lines(tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield from first_cache_lines(tensor.values())
    elif has_numbers(tensor):
        try:
            start = tensor.untyped_storage().data_ptr() >> CACHE_LINE_BITS
        except RuntimeError:  # a kind of tensor without its own memory
            return
        if start:
            yield start


def is_freed(tensor: Tensor) -> bool:
    """Tell whether a tensor's storage was freed, as FSDP does; a read would crash the process.

    For a tensor that a transform has wrapped, pass `unwrap_all_transforms(tensor)`.
    """
    if type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return False
    try:
        return tensor.untyped_storage().nbytes() == 0
    except RuntimeError:
        return False


@final
class _Memory:
    """The memory of a model's parameters and buffers, at the time of the last look-up.

    Attributes:
        lines: the cache lines where parameters and buffers begin.
        n_modules: the number of the model's modules; -1 before the first look-up.
    """

    lines: Container[int] = ()
    n_modules = -1
    # A sample of the parameters: the module, the parameter's name, and its address.
    _witnesses: Sequence[tuple[weakref.ref[nn.Module], str, int]] = ()

    def read_lines(self, root: nn.Module | None, n_modules: int) -> None:
        """Look up the memory of a model, which is not held, with this number of modules."""
        tables = [] if root is None else tensor_tables(root)
        lines: set[int] = set()
        for _, parameters_here, buffers_here in tables:
            lines.update(_cache_lines_of(parameters_here), _cache_lines_of(buffers_here))
        lines.discard(0)  # 0 stands for tensors without memory
        named = [
            (module, name, tensor)
            for module, parameters_here, _ in tables
            if parameters_here and not isinstance(module, torch.jit.ScriptModule)
            for name, tensor in parameters_here.items()
        ]
        last = len(named) - 1  # the first parameter, the last one, and two between
        witnesses = [
            (weakref.ref(module), name, _address_of(tensor))
            for place in (sorted({0, last // 3, 2 * last // 3, last}) if named else ())
            for module, name, tensor in [named[place]]
        ]
        # In this order, so that a thread that finds one of these up to date finds the lines so.
        self.lines, self._witnesses, self.n_modules = lines, witnesses, n_modules

    def has_moved(self) -> bool:
        """Tell whether a sampled parameter has moved or is gone."""
        for reference, name, place in self._witnesses:
            module = reference()
            if module is None or _address_of(own_parameters(module).get(name)) != place:
                return True
        return False


def _cache_lines_of(table: Mapping[str, Tensor | None]) -> list[int]:
    """Return the cache lines where a module's own parameters, or its buffers, begin."""
    tensors = [tensor for tensor in table.values() if tensor is not None]
    try:
        if all(type(tensor) in _PLAIN for tensor in tensors):
            return [tensor.untyped_storage().data_ptr() >> CACHE_LINE_BITS for tensor in tensors]
    except RuntimeError:  # a sparse tensor, or a tensor of a transform
        pass
    return [line for tensor in tensors for line in first_cache_lines(tensor)]


def _address_of(parameter: Tensor | None) -> int:
    """Return a parameter's address, to tell whether it has moved; 0 if it has no memory."""
    if type(parameter) in _PLAIN:
        try:
            return parameter.data_ptr()  # type: ignore[union-attr]
        except RuntimeError:  # a sparse tensor, or a tensor of a transform
            pass
    return 0 if parameter is None else next(first_cache_lines(parameter), 0)


# Kept for each recorded model: a loop that attaches in each step looks up the same memory.
_memories: WeakIdentityMap[_Memory] = WeakIdentityMap()
