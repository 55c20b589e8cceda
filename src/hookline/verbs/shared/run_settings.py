"""Hold what a run depends on beside the model and its inputs: random numbers and autocast."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import final

import numpy as np
import torch
from torch import nn


@final
class RandomStates:
    """The states of the random generators of torch, Python and numpy, when this was made.

    `generators` are further generators of torch, such as a model's own.
    """

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        is_cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        of_devices = torch.cuda.default_generators if is_cuda_used else ()
        of_torch = (torch.default_generator, *of_devices, *generators)
        self._torch = [(generator, generator.get_state()) for generator in of_torch]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def are_current(self) -> bool:
        """Tell whether all generators are still in these states."""
        # Their bytes, because there are arrays among the parts.
        numpy_now, numpy_before = map(
            pickle.dumps, (np.random.get_state(legacy=False), self._numpy)
        )
        return (
            numpy_now == numpy_before
            and random.getstate() == self._python
            and all(torch.equal(generator.get_state(), state) for generator, state in self._torch)
        )

    def restore(self) -> None:
        """Put the generators into these states again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._torch:
            generator.set_state(state)


def generators_of(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Return the random generators that are attributes of modules."""
    attributes = [vars(module).values() for module in modules]
    # Not isinstance: torch's metaclass answers it in Python, and few kinds make up all attributes.
    kinds: set[type] = set().union(*[map(type, values) for values in attributes])
    kinds = {kind for kind in kinds if torch.Generator in kind.__mro__}
    if not kinds:
        return []
    generators = {
        id(value): value for values in attributes for value in values if type(value) in kinds
    }
    return list(generators.values())


# For each kind of device: whether autocast is on, and its dtype.
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def current_autocast() -> Autocast:
    """Return the autocast of the running code."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


@contextmanager
def use_autocast(autocast: Autocast) -> Iterator[None]:
    """Run the block in this autocast."""
    with ExitStack() as stack:
        for device, is_on, dtype in autocast:
            if is_on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_on))
        yield
