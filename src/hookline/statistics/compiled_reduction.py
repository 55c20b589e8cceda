"""Functions of flat tensors, each compiled once for tensors of any length.

They are compiled by inductor without dynamo. torch.compile would guard each call, which takes 40 µs
more. It would also compile again under autocast, in inference mode and at each change of a global
setting, and each time count towards the user's recompile limit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import type_and_line
from hookline.engine import compile_graph
from hookline.errors import warn
from hookline.util.fork_safe_lock import fork_safe_lock

LONGEST = 2**30  # elements: generated code indexes with 32 bits

Reduction = Callable[[Tensor, Tensor], Tensor]

# A prime, so that nothing is compiled for a divisor of it.
_EXAMPLE_NUMEL = 20_011


@final
class CompiledReduction:
    """A function of slots and a flat tensor, compiled for each dtype and device when it is asked.

    Args:
        function: a function of torch operations alone, without a branch on a number.
        n_slots: the number of slots.
    """

    def __init__(self, function: Reduction, n_slots: int) -> None:
        self._function = function
        self._n_slots = n_slots
        self.reductions: dict[tuple[Any, ...], Reduction | None] = {}
        self._lock = fork_safe_lock()
        self._has_warned = False

    def find_or_compile(self, values: Tensor, compile: bool) -> Reduction | None:
        """Return the compiled function for tensors of 2 to `LONGEST` elements; None without it.

        The function is compiled for the number of threads that torch has now.

        Args:
            values: a tensor of the dtype and on the device.
            compile: whether to compile the function now, which takes seconds.
        """
        key = (values.dtype, values.device, torch.get_num_threads())
        reduction = self.reductions.get(key)
        if reduction is None and compile and key not in self.reductions:
            with self._lock:
                if key not in self.reductions:
                    self.reductions[key] = None  # also if a warning is raised as an error
                    self.reductions[key] = self._try_to_compile(values)
                reduction = self.reductions[key]
        return reduction

    def _try_to_compile(self, values: Tensor) -> Reduction | None:
        try:
            return _call_in_new_thread(lambda: self._compile(values.dtype, values.device))
        except Exception as error:  # inductor may raise anything, for example without a compiler
            if not self._has_warned:
                self._has_warned = True
                warn(
                    "The function that measures tensors could not be compiled:"
                    f" {type_and_line(error)[:100]}. It runs uncompiled, which is slower."
                    "\nInstall a C++ compiler, or use hl.stats.moments(compile=False)."
                )
            return None

    def _compile(self, dtype: torch.dtype, device: torch.device) -> Reduction:
        slots = torch.zeros(self._n_slots, dtype=torch.float64, device=device)
        values = torch.zeros(_EXAMPLE_NUMEL, dtype=dtype, device=device)

        def as_tuple(slots: Tensor, values: Tensor) -> tuple[Tensor]:
            return (self._function(slots, values),)

        compiled, inputs = compile_graph(as_tuple, slots, values)
        _check_accepts_any_length(inputs[1])

        def call(slots: Tensor, values: Tensor) -> Tensor:
            result: Tensor = compiled([slots, values])[0]
            return result

        return call


def _check_accepts_any_length(values: Any) -> None:
    """Raise an error where the compiled code is for some lengths alone."""
    length = values.shape[0].node.expr
    for guard in values.fake_mode.shape_env.guards:
        if length in guard.expr.free_symbols and not all(
            bool(guard.expr.subs({length: n})) for n in (2, 3, LONGEST - 1, LONGEST)
        ):
            raise RuntimeError(f"the code would be for lengths with {guard.expr} alone")


def _call_in_new_thread(function: Callable[[], Reduction]) -> Reduction:
    """Call a function in a thread that has no mode of this one: autocast, inference, dispatch."""

    def run() -> Reduction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing inductor uses deprecated parts of torch
            return function()

    with ThreadPoolExecutor(1, "hookline-compile") as pool:
        return pool.submit(run).result()
