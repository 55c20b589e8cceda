"""Pack the tensors that autograd saves for backward while a module runs.

torch keeps saved-tensor hooks on a stack in each thread. The hooks of a module are pushed when its
call begins and popped when the call ends, also by an exception. After Ctrl-C, the next call or the
end of the line pops them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, cast, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    HookSpec,
    Order,
    Pass,
    Passes,
    RunningCalls,
    Site,
    Tap,
    call_frame,
    do_nothing,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    run_at_trace_time,
)
from hookline.engine.pytree.describe import in_full, in_words
from hookline.errors import AttachError, StructureError
from hookline.util.fork_safe_lock import fork_safe_lock

_lock = fork_safe_lock()

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class _CallsWithPushedHooks(threading.local):
    """The calls of a module in a thread that have pushed saved-tensor hooks."""

    def __init__(self) -> None:
        self.calls = RunningCalls()


@final
class SavedTap(Tap):
    """Pack the tensors saved for backward in a module, and unpack them, by a user's functions."""

    __slots__ = ("_closed", "_n_open", "_pack", "_pushed", "_unpack")
    hooks: tuple[HookSpec, HookSpec] = (
        HookSpec("forward", "end", Order.BEGIN, always_call=True),
        HookSpec("forward_pre", "begin", Order.END),
    )

    def __init__(self, site: Site, passes: Passes, pack: Pack, unpack: Unpack) -> None:
        super().__init__(site, passes, do_nothing, Order.HOOK)
        self._pack = pack
        self._unpack = unpack
        self._pushed = _CallsWithPushedHooks()
        self._n_open = 0  # calls under way, in all threads
        self._closed: Callable[[], None] | None = None

    def begin(self, module: nn.Module, args: Any) -> None:
        """Push the saved-tensor hooks: the last forward-pre hook."""
        if is_dynamo_compiling():
            self.refuse_compilation()
        current = self._pass_of(module)
        if current is None:
            return
        if current.region is not None:
            current.region.record_change(str(self.site), None, None)
        calls, frame = self._pushed.calls, call_frame(sys._getframe(1))
        self._pop_hooks_of_calls(calls.drop_ended(frame.f_back))
        is_for_nothing = (
            current.recomputation is not None and not current.recomputation.has_gradients
        )
        push_saved_tensors_hooks(
            self._call_pack if is_for_nothing else self.pack, self._call_unpack
        )
        calls.begin(frame, module)
        with _lock:
            self._n_open += 1

    def _pop_hooks_of_calls(self, n_calls: int) -> None:
        for _ in range(n_calls):
            pop_saved_tensors_hooks()
        with _lock:
            self._n_open -= n_calls

    @run_at_trace_time
    def refuse_compilation(self) -> None:
        """Refuse the compilation of code that calls this tap.

        Raises:
            AttachError: always, because the compiler chooses which tensors a graph saves.
        """
        raise AttachError(
            f"{self.site} must run outside compiled code for line.saved, got compiled code.\nPut"
            " torch.compiler.set_stance('force_eager') around the block."
        )

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Pop the saved-tensor hooks: the first forward hook, always called."""
        if is_dynamo_compiling():
            return
        if not hasattr(self, "_pushed"):
            return  # an inert copy: `begin` never ran, because a pre-hook failed before
        self._pop_hooks_of_calls(self._pushed.calls.end(call_frame(sys._getframe(1))))
        if self._closed is not None and not self._n_open:
            self._closed()
            self._closed = None

    def _recomputed_pass(self, current: Pass) -> Pass:
        # If torch packs the tensors saved in the recomputation, it needs the same hooks as before.
        return current

    def pop_remaining_hooks(self) -> None:
        """Pop the hooks that are still pushed in this thread, at the end of the line."""
        self._pop_hooks_of_calls(len(self._pushed.calls))
        self._pushed.calls.clear()
        self._closed = None

    def closing_hook(self) -> str | None:
        """Return the method that must still pop the hooks of calls under way; None without any."""
        self._pop_hooks_of_calls(
            self._pushed.calls.drop_ended(sys._getframe(1))
        )  # calls that Ctrl-C ended
        return "end" if self._n_open else None

    def call_when_closed(self, then: Callable[[], None]) -> None:
        """Call a function when the calls under way have ended."""
        self._closed = then

    def pack(self, tensor: Tensor) -> Any:
        """Return the packed form of a tensor, and the form that unpacking must restore."""
        if self.is_removed:  # the line ended during a call
            return tensor.detach(), None
        self.fired += 1
        return self._call_pack(tensor)

    def _call_pack(self, tensor: Tensor) -> Any:
        try:
            return self._pack(tensor), (tensor.shape, tensor.dtype, tensor.device)
        except Exception as error:
            self._add_error_note(error)
            raise

    def _call_unpack(self, pair: tuple[Any, Any]) -> Tensor:
        # This also runs after the line's end, because packed tensors must be unpacked.
        packed, form = pair
        if form is None:
            return cast(Tensor, packed)
        try:
            tensor = self._unpack(packed)
        except Exception as error:
            self._add_error_note(error)
            raise
        if not isinstance(tensor, Tensor):
            raise StructureError(
                f"unpack at {self.site} must return the tensor that was packed, got"
                f" {in_words(tensor)}.\nReturn a tensor of its shape, dtype and device."
            )
        if (tensor.shape, tensor.dtype, tensor.device) != form:
            shape, dtype, device = form
            raise StructureError(
                f"unpack at {self.site} must return a tensor of shape {list(shape)}, {dtype}, on"
                f" {device}, got {in_full(tensor)}.\nReturn a tensor of that form."
            )
        return tensor
