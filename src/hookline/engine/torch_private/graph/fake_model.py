"""Copies of models and inputs that have shapes and no numbers: torch's fake tensors.

A copy is made in two steps. The first puts a tensor of the meta device in place of each tensor, and
may be made while the model runs. The second puts torch's fake tensors in place of these. It loads
the symbolic parts of torch, which takes seconds, so it waits until the copy is to run.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.engine.torch_private.distributed import class_before_fsdp2, is_dtensor, sharding_kind
from hookline.engine.torch_private.modules import children
from hookline.errors import ModelError

Flags = list[tuple[bool, list[bool]]]


class Runnable(NamedTuple):
    """Modules by path, and the inputs of the model, all with fake tensors."""

    modules: dict[str, nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@final
class FakeModel:
    """A copy of a model without numbers and without hooks, to run on shapes.

    The copy shares no Python object with the model that a copy can have for itself. A parameter
    that FSDP2 shards has its whole shape in the copy.

    Raises:
        ModelError: the model is split over ranks in a way that a copy cannot undo.
        Exception: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        split = sharding_kind(model)
        if split not in ("", "FSDP2"):
            raise ModelError(_SPLIT[split])
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ModelError("it holds a scripted module")
        self._meta_copies = _MetaCopies()
        self._memo: dict[int, Any] = {}
        every = list(model.modules())
        for module in every:
            self._drop_copied_hooks(module)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if id(tensor) not in self._memo:
                    self._memo[id(tensor)] = self._meta_copies.to_meta(tensor)
        shells = [(module, self._empty_copy(module)) for module in every if is_fsdp2(module)]
        with self._meta_copies:
            for module, shell in shells:
                state = module.__getstate__()  # type: ignore[no-untyped-call]
                shell.__dict__.update(copy.deepcopy(state, self._memo))
            for module in reversed(every):
                inner = _module_in_compiled(module)
                if inner is not None:  # the copy runs eagerly
                    self._memo[id(module)] = copy.deepcopy(inner, self._memo)
            copy.deepcopy(model, self._memo)
        self._every = [self._memo[id(module)] for module in every]
        self._modules = {path: self._memo[id(module)] for path, module in modules.items()}

    def copy_inputs(self, value: Any) -> Any:
        """Return a copy of inputs without numbers, except those that are a part of their shapes."""
        memo = dict(self._memo)
        for packed in _packed_sequences(value):
            memo[id(packed.batch_sizes)] = self._meta_copies.copy_with_numbers(packed.batch_sizes)
        with self._meta_copies:
            return copy.deepcopy(value, memo)

    def release(self) -> None:
        """Let go of the model: from now on, no more inputs are copied."""
        self._memo.clear()  # a memo also holds the objects that were copied

    @contextmanager
    def runnable_copy(self, inputs: tuple[Any, Any], flags: Flags) -> Iterator[Runnable]:
        """Yield fake modules and inputs, with the flags that the model had; run them in the block.

        The inputs are arguments and keyword arguments, from `copy_inputs`.
        """
        # Late, because it loads sympy.
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
            memo = self._meta_copies.fakes_by_id()
            with _Fakes(self._meta_copies):
                parts = copy.deepcopy((self._every, self._modules, inputs), memo)
            every, modules, (args, kwargs) = parts
            for module, (training, needs) in zip(every, flags, strict=True):
                module.training = training
                for parameter, need in zip(module.parameters(recurse=False), needs, strict=False):
                    parameter.requires_grad_(need)
            # In threads of their own, as on a GPU, nodes would have numbers of their own.
            in_thread = torch.autograd.set_multithreading_enabled(False)
            with (
                _silence_fake_errors(),
                in_thread,
                self._meta_copies.with_numbers(),
                _MissingShapes(),
            ):
                yield Runnable(modules, args, kwargs)

    def _drop_copied_hooks(self, module: nn.Module) -> None:
        for name, hooks in vars(module).items():
            if name.startswith(_COMPOSABLE):  # the state of FSDP2, with its hooks and groups
                self._memo[id(hooks)] = OrderedDict()
            if not name.startswith("_") or "_hooks" not in name or not isinstance(hooks, dict):
                continue
            # The hooks of `torch.nn.utils` compute weights: they are a part of the model.
            lasting_hooks = {
                k: h for k, h in hooks.items() if type(h).__module__.startswith("torch.nn.util")
            }
            self._memo[id(hooks)] = OrderedDict(lasting_hooks)

    def _empty_copy(self, module: nn.Module) -> nn.Module:
        """Return an empty copy of a module that FSDP2 forbids to copy, of its original class."""
        kind: Any = class_before_fsdp2(module)
        shell: nn.Module = kind.__new__(kind)
        nn.Module.__init__(shell)
        self._memo[id(module)] = shell
        return shell


def module_flags(model: nn.Module) -> Flags:
    """Return the modes of a model's modules, and which of their parameters require gradients."""
    return [
        (
            module.training,
            [parameter.requires_grad for parameter in module.parameters(recurse=False)],
        )
        for module in model.modules()
    ]


def why_not_fakeable(error: BaseException) -> str:
    """Return why a model does not run on shapes, as part of a sentence."""
    name = type(error).__name__
    if name in _ON_NUMBERS:
        return f"its code depends on the numbers in tensors ({getattr(error, 'func', name)})"
    text = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
    return f"{name}: {text[:_LONGEST]}".rstrip(": .")


@final
class _MetaCopies(TorchFunctionMode):
    """Copy tensors to the meta device, and know their own devices."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Tensor, torch.device]] = []
        self._devices: dict[int, torch.device] = {}  # by the address of the copy's storage
        self._with_numbers: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.to_meta(tensor)
            return memo[id(tensor)]
        if func is _CLONE:  # of a parameter that no module holds
            return self.to_meta(args[0])
        return func(*args, **(kwargs or {}))

    def to_meta(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the meta device in place of this one.

        Raises:
            ModelError: the tensor is not described by a shape and strides.
        """
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise ModelError(f"a tensor has layout {tensor.layout}")
            meta_copy = _as_parameter_like(_empty_on_device(tensor, torch.device("meta")), tensor)
        self._made.append((meta_copy, tensor.device))
        self._devices[meta_copy.untyped_storage()._cdata] = tensor.device
        return meta_copy

    def copy_with_numbers(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that keeps its numbers, in the copy that runs, too."""
        self._with_numbers.append(tensor.clone())
        return self._with_numbers[-1]

    def with_numbers(self) -> AbstractContextManager[Any]:
        """Return a context in which operations on tensors that keep their numbers have numbers."""
        return _NumbersMode(self._with_numbers) if self._with_numbers else nullcontext()

    def is_meta_copy(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a meta copy, or shares the memory of one."""
        return tensor.untyped_storage()._cdata in self._devices

    def fake_on_original_device(self, meta_copy: Tensor) -> Tensor:
        """Return a fake tensor on the device of the original, by the memory of its copy."""
        return _empty_on_device(meta_copy, self._devices[meta_copy.untyped_storage()._cdata])

    def fakes_by_id(self) -> dict[int, Any]:
        """Return fake tensors on the devices of the originals, by the id of the meta copy."""
        fakes = {
            id(made): _as_parameter_like(_empty_on_device(made, device), made)
            for made, device in self._made
        }
        return fakes | {id(tensor): tensor for tensor in self._with_numbers}


@final
class _NumbersMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run operations with numbers if all their tensors keep numbers, such as sizes of batches."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {id(tensor): tensor for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily  # late: it loads sympy

        tensors = [value for value in args if isinstance(value, Tensor)]
        if not tensors or any(id(tensor) not in self._known for tensor in tensors):
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self._known[id(value)] = value
        return result


@contextmanager
def _silence_fake_errors() -> Iterator[None]:
    """Keep torch from logging the errors of fake tensors in this thread: they are told once."""
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


@final
class _MissingShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give a shape to results of which torch knows none.

    torch computes products of groups of matrices, as of experts, in each dtype, but knows the shape
    of those in bfloat16 alone. It knows no shapes of the backward of recurrent layers on a GPU.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _empty_grouped_mm(*args, **(kwargs or {}))
        if func in _RNN_BACKWARDS:
            return _empty_rnn_gradients(*args)
        result = func(*args, **(kwargs or {}))
        if func in _RNNS and result[-1] is None:  # the weights as one buffer, which backward asks
            return (*result[:-1], result[0].new_empty(0))
        return result


_aten = torch.ops.aten
_RNNS = (_aten._cudnn_rnn.default, _aten.miopen_rnn.default)
_RNN_BACKWARDS = (_aten._cudnn_rnn_backward.default, _aten.miopen_rnn_backward.default)


def _empty_rnn_gradients(
    inputs: Tensor, weights: list[Tensor], _: int, buffer: Tensor, *rest: Any
) -> tuple[Any, ...]:
    state, cell, has_weights = rest[0], rest[1], rest[-1][-1]
    given = [None if tensor is None else torch.empty_like(tensor) for tensor in (state, cell)]
    of_weights = [torch.empty_like(weight) for weight in weights if has_weights]
    return torch.empty_like(inputs), *given, of_weights


def _empty_grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():  # a product for each group
        ends = left if offs is None else offs
        shape = [ends.shape[0], *shape]
    return left.new_empty(shape, dtype=out_dtype)


@final
class _Fakes(TorchFunctionMode):
    """Copy meta copies that are not known by their id: parameters that no module holds.

    A copy of such a parameter is made of its data.
    """

    def __init__(self, meta_copies: _MetaCopies) -> None:
        super().__init__()
        self._meta_copies = meta_copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA and self._meta_copies.is_meta_copy(args[0]):
            return self._meta_copies.fake_on_original_device(args[0])
        return func(*args, **(kwargs or {}))


_CLONE = torch._C.TensorBase.clone
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def _packed_sequences(value: Any) -> Iterator[PackedSequence]:
    """Yield the packed sequences among inputs."""
    if isinstance(value, PackedSequence):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _packed_sequences(part)


def _empty_on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same form without numbers; of a DTensor, of the whole."""
    if is_dtensor(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _as_parameter_like(meta_copy: Tensor, tensor: Tensor) -> Tensor:
    """Make a parameter of a tensor where the original is one, and let it require gradients."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta_copy, requires_grad=tensor.requires_grad)
    return meta_copy.requires_grad_(tensor.requires_grad)


def is_fsdp2(module: nn.Module) -> bool:
    """Tell whether FSDP2 shards a module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _module_in_compiled(module: nn.Module) -> nn.Module | None:
    """Return the module inside `torch.compile(module)`; None for any other module."""
    is_optimized = any(base.__name__ == "OptimizedModule" for base in type(module).__mro__)
    return children(module).get("_orig_mod") if is_optimized else None


# Errors of fake tensors where an operation needs the numbers, or makes a shape of them.
_ON_NUMBERS = ("DataDependentOutputException", "DynamicOutputShapeException")
_LONGEST = 150  # characters of a message of torch
# The attributes in which torch keeps the state of `fully_shard` and `replicate`.
_COMPOSABLE = "__composable_api"
_SPLIT = {
    "FSDP1": "FSDP1 shards the model's weights",
    "split": "tensor parallelism splits the model's weights",
}
