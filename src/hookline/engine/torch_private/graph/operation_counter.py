"""Operations as torch dispatches them: their FLOPs, and the memory that they make."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload

from hookline.engine.torch_private.graph.flop_formulas import (
    PLACE_OF_WORKSPACE,
    extra_formulas,
    may_do_matrix_work,
    may_lack_formula,
    sparse_formula,
    unsized_workspace,
)

ON_NESTED = "on nested tensors"  # ends the name of an operation that is not counted for this


@final
class OperationCounter:
    """Count FLOPs by torch's formulas, and the bytes of the tensors that operations make.

    Args:
        done: called after each operation with its FLOPs and the bytes that are alive.
        missing: called with the name of an operation that does matrix work and has no formula.
        workspace: returns the bytes of the workspace that the running operation keeps for backward.
            Tensors without numbers do not show this size.
    """

    def __init__(
        self,
        done: Callable[[int, int], None],
        missing: Callable[[str], None] | None = None,
        workspace: Callable[[], int] | None = None,
    ) -> None:
        from torch.utils import flop_counter  # late, because it would slow `import hookline`

        # The names that torch's mode reads.
        self.flop_registry: dict[Any, Any] = {**flop_counter.flop_registry, **extra_formulas()}
        self.flop_counts: Any = defaultdict(lambda: defaultdict(int))
        self._mode = _counting_mode(flop_counter._FlopCounterMode)
        self._done = done
        self._missing = missing
        self._workspace = workspace
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._n_bytes = 0

    def counting(self) -> AbstractContextManager[Any]:
        """Return a context in which operations are counted."""
        mode: AbstractContextManager[Any] = self._mode(self)
        return mode

    def report_nested(self, operation: Any) -> None:
        """Note that an operation on nested tensors is not counted, if it does matrix work."""
        name = operation._qualified_op_name
        if self._missing is not None and may_do_matrix_work(name.partition("::")[2]):
            self._missing(f"{name} {ON_NESTED}")

    def _count_flops(self, operation: Any, out: Any, args: Any, kwargs: Any) -> Any:
        formula = sparse_formula(operation, args) or self.flop_registry.get(operation)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
        if formula is None and self._missing is not None and may_lack_formula(operation):
            self._missing(operation._qualified_op_name)
        if self._workspace is not None:
            out = self._with_sized_workspace(operation, out)
        # A view of a parameter or an input, or one that was written to, is not made here.
        argument_storages = {storage._cdata for storage in _storages([*args, *kwargs.values()])}
        for storage in _storages([out]):
            if storage._cdata not in argument_storages:
                self._track_storage(storage)
        self._done(flops, self._n_bytes)
        return out

    def _with_sized_workspace(self, operation: Any, out: Any) -> Any:
        """Return a result whose workspace has the size that it has on tensors with numbers."""
        workspace = unsized_workspace(operation, out)
        if workspace is None or self._workspace is None:
            return out
        resized = torch.empty(self._workspace(), dtype=torch.uint8, device=workspace.device)
        parts = list(out)
        parts[PLACE_OF_WORKSPACE] = resized
        return tuple(parts)

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, int(storage.nbytes())
        known_ref = self._alive.get(key)
        if known_ref is None or known_ref() is not storage:

            def freed(ref: Any) -> None:
                if self._alive.get(key) is ref:
                    del self._alive[key]
                self._n_bytes -= n_bytes

            self._n_bytes += n_bytes
            self._alive[key] = weakref.ref(storage, freed)


@cache
def _counting_mode(counting: Any) -> Any:
    """Return torch's mode that counts, which neither decomposes nor counts nested tensors."""

    class Counting(counting):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if isinstance(func, OpOverload) and any(map(_is_nested, args)):
                self.counter.report_nested(func.overloadpacket)
                return func(*args, **kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Counting


def _is_nested(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_nested, value))
    return isinstance(value, Tensor) and value.is_nested


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Give the memory of the tensors among an operation's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            # A tensor without memory of its own, such as a sparse one, has none to give.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                yield value.untyped_storage()
        elif isinstance(value, tuple | list):
            yield from _storages(value)
