"""Keep what repeats a run of the root: references, and few copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.engine import every_tensor
from hookline.engine.compile.compiled_modules import inside_compiled
from hookline.engine.pytree import tree
from hookline.engine.torch_private.graph.nodes import next_number
from hookline.engine.torch_private.modules import buffers, unwrap
from hookline.util.locks import fork_safe_lock
from hookline.verbs.check.finiteness import Measure
from hookline.verbs.check.loss_line import CalledAt, users_frame
from hookline.verbs.shared.random_states import RandomStates, generators_of
from hookline.verbs.shared.run_model import restore_state

# The key in `Pass.opened` of a pass's run.
RUN = object()
_DEVICES = ("cpu", "cuda")


@final
class Run:
    """One run of the root.

    Args:
        step: the number of the run, from 0.
        is_sharded: whether its weights are sharded over ranks.
        is_transformed: whether it runs inside a transform of torch.func.

    Attributes:
        sums: a number for each output of a leaf module and of the root, in the order of the run:
            the number of the site, a tensor that is not finite if any element is not, and the
            function that measured it; None where compiled code did.
        first_node: the number of its first node; None where the root was not called.
        called_at: the line that called the root.
        output: the root's output, while its pass ends; None where it is not known.
        is_output_finite: True if the root's output was finite, by its sums.
        args: the root's arguments; None where they are not known.
        kwargs: its keyword arguments.
        gradients: the gradients of the root's outputs, by slot, once they have arrived.
    """

    __slots__ = (
        "_autocast", "_before", "_generators", "_is_inference", "_is_sharded", "_is_transformed",
        "_random", "_tensors", "args", "called_at", "first_node", "gradients", "has_grad",
        "is_output_finite", "kwargs", "output", "step", "sums",
    )  # fmt: skip

    def __init__(self, step: int, *, is_sharded: bool, is_transformed: bool) -> None:
        self.step = step
        self._is_transformed = is_transformed
        self._is_sharded = is_sharded
        self.sums: list[tuple[int, Tensor, Measure | None]] = []
        self.first_node: int | None = None
        self.called_at: CalledAt | None = None
        self.output: Any = None
        self.is_output_finite = False
        self.args: tuple[Any, ...] | None = None
        self.kwargs: dict[str, Any] = {}
        self.gradients: dict[int, Tensor] = {}
        self.has_grad = torch.is_grad_enabled()
        self._tensors: list[tuple[Tensor, int | None]] = []
        self._before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._random: RandomStates | None = None
        self._generators: list[torch.Generator] = []

    def begin(self, frame: FrameType, root: nn.Module, changing: ChangingBuffers) -> None:
        """Keep references to the root's arguments, and the random state."""
        self.first_node = next_number()
        caller = users_frame(frame)
        if caller is not None:
            self.called_at = CalledAt(caller.f_code, caller.f_lineno)
        local = frame.f_locals
        owner = local.get("self", local.get("optimized"))
        owner = local["held"]() if owner is None and "held" in local else owner
        if not isinstance(owner, nn.Module) or unwrap(inside_compiled(owner)) is not unwrap(root):
            return
        self.args, self.kwargs = local["args"], local["kwargs"]
        if changing.copies_inputs:
            self.args, self.kwargs = tree.map_tensors(_copy, (self.args, self.kwargs))
        found = every_tensor((self.args, self.kwargs))
        self._tensors = [(one, version(one)) for one in found]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _DEVICES
        ]
        self._is_inference = torch.is_inference_mode_enabled()
        self._before = changing.copies(root)
        self._generators = changing.generators
        self._random = RandomStates(self._generators)

    def are_inputs_overwritten(self) -> bool:
        """Tell whether an input has been overwritten in place since the run began."""
        return any(version(one) != before for one, before in self._tensors)

    def why_not_repeatable(self) -> str | None:
        """Say why the run cannot be repeated; None if it can."""
        if self._is_sharded:
            return "weights are sharded, and a repeated run would wait for the other ranks"
        if self._is_transformed:
            return "a transform of torch.func runs the model; check the run without it"
        if self.args is None:
            return "the model was not called, only a part; check that, as in hl.check(m.net)"
        found = every_tensor((self.args, self.kwargs))
        if [id(one) for one in found] != [id(one) for one, _ in self._tensors]:
            return "an argument of the model was changed by the run, such as a cache that grows"
        if self.are_inputs_overwritten():
            return "an input of the model was overwritten in place after the run began"
        return None

    @contextmanager
    def repeated_state(self, root: nn.Module) -> Iterator[None]:
        """Put buffers, random states and modes as they were when the run began, for the block."""
        with ExitStack() as stack:
            stack.enter_context(self.left_as_found(root))
            for table, name, copy in self._before:
                held = table.get(name)
                if held is not None and held.shape == copy.shape:
                    table[name] = copy.clone()
            assert self._random is not None
            self._random.restore()
            for kind, is_on, dtype in self._autocast:
                if is_on or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_grad))
            yield

    @contextmanager
    def left_as_found(self, root: nn.Module) -> Iterator[None]:
        """Put buffers, training flags and random states back after the block."""
        states = RandomStates(self._generators)
        try:
            with restore_state(root):
                yield
        finally:
            states.restore()

    def buffer_before(self, module: nn.Module, name: str) -> Tensor | None:
        """Return a buffer as it was when the run began; None if the run has not changed it."""
        table = buffers(module)
        return next((c for held, key, c in self._before if held is table and key == name), None)

    def autocast_on(self) -> list[tuple[str, str]]:
        """Return the kinds of devices with autocast on, and its dtypes."""
        return [
            (kind, str(dtype).removeprefix("torch."))
            for kind, is_on, dtype in self._autocast
            if is_on
        ]

    def drop(self) -> None:
        """Release everything, because nothing of the run is repeated any more."""
        self.args, self.kwargs, self._tensors, self._before = None, {}, [], []
        self.gradients, self.sums, self.output = {}, [], None


@final
class ChangingBuffers:
    """The buffers of a model that its forward writes to, as batch norm does.

    All buffers are copied until the first run in each mode has ended. From then on, only those that
    have changed in that run are.

    Attributes:
        copies_inputs: whether an earlier run has overwritten its inputs, so that copies are kept.
        generators: the random generators that are attributes of the model's modules.
    """

    __slots__ = (
        "_all", "_changing", "_is_training", "_lock", "_versions", "copies_inputs", "generators",
    )  # fmt: skip

    def __init__(self) -> None:
        self.copies_inputs = False
        self.generators: list[torch.Generator] = []
        self._all: list[tuple[dict[str, Tensor | None], str]] = []
        self._changing: list[tuple[dict[str, Tensor | None], str]] = []
        self._is_training: bool | None = None
        self._versions: list[tuple[int, int | None]] | None = None
        self._lock = fork_safe_lock()  # runs may begin in several threads

    def copies(self, root: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
        """Copy the buffers that the run may change."""
        with self._lock:
            if self._is_training is not root.training:
                self._is_training = root.training
                self.generators = generators_of(root)
                self._all = [
                    (table, name)
                    for module in root.modules()
                    for table in (buffers(module),)
                    for name, held in table.items()
                    if held is not None and not held.is_meta
                ]
                self._versions = [_state(table, name) for table, name in self._all]
            return self._copied(self._changing if self._versions is None else self._all)

    def learn(self) -> None:
        """Learn which buffers a run has changed that has ended."""
        with self._lock:
            before, self._versions = self._versions, None
            if before is not None:
                self._changing = [
                    place
                    for place, state in zip(self._all, before, strict=True)
                    if _state(*place) != state
                ]

    @staticmethod
    def _copied(
        places: list[tuple[dict[str, Tensor | None], str]],
    ) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
        held = [(table, name, table.get(name)) for table, name in places]
        return [(table, name, one.detach().clone()) for table, name, one in held if one is not None]


def _state(table: dict[str, Tensor | None], name: str) -> tuple[int, int | None]:
    held = table.get(name)
    return id(held), None if held is None else version(held)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version
