"""Keep the states of the random generators that a model draws from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import final

import torch
from torch import nn

from hookline.util.imported import imported


@final
class RandomStates:
    """The states of the random generators of torch, Python and numpy, when this was made.

    Args:
        generators: generators of torch besides the usual ones, such as a model's own.
    """

    __slots__ = ("_cuda", "_numpy", "_own", "_python", "cpu")

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self.cpu = torch.get_rng_state()
        is_cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if is_cuda_used else []
        self._python = random.getstate()
        numpy = imported("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state(legacy=False)
        self._own = [(one, one.get_state()) for one in generators]

    def restore(self) -> None:
        """Put the generators into these states again."""
        torch.set_rng_state(self.cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        for generator, state in self._own:
            generator.set_state(state)


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """Return the random generators that are attributes of a model's modules."""
    held = (one for module in model.modules() for one in vars(module).values())
    return list({id(one): one for one in held if isinstance(one, torch.Generator)}.values())
