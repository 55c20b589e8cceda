"""The protocol of a mergeable statistic: four methods on one flat tensor of numbers."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

ResultT_co = TypeVar("ResultT_co", covariant=True)


@runtime_checkable
class Statistic(Protocol[ResultT_co]):
    """A statistic of values that adds up over calls, passes, steps and ranks.

    A statistic keeps what it has seen in *slots*: one flat float64 tensor on the value's device. So
    the slots of any number of statistics reach the CPU in one transfer, and other ranks in one
    collective.

    Any object with these four methods is a statistic:

    - `start(value)` returns empty slots for values like this one.
    - `update(slots, value)` returns the slots with one more value. It must not write to `slots`,
      and must not read a number back from the device. Compiled code traces it, so there it must
      consist of torch functions, without a branch on a number.
    - `merge(slots, other)` returns the slots of all values of both slots.
    - `result(slots)` returns what the user reads, from slots on the CPU.

    If the slots of a value are those of its rows (the last dimension) merged, the object may have
    the attribute `takes_blocks = True`. `hl.monitor` then computes the attention patterns of long
    texts in blocks of queries, and never makes a whole one. The statistics of `hl.stats` have it.

    The statistic of this example keeps the least and the greatest element, which a quantisation
    needs:

        >>> class Range:
        ...     def start(self, value):
        ...         limits = [float("-inf"), float("-inf")]
        ...         return torch.tensor(limits, dtype=torch.float64, device=value.device)
        ...     def update(self, slots, value):
        ...         low, high = value.detach().aminmax()
        ...         return torch.maximum(slots, torch.stack([-low, high]).double())
        ...     def merge(self, slots, other):
        ...         return torch.maximum(slots, other)
        ...     def result(self, slots):
        ...         return -slots[0].item(), slots[1].item()
        >>> limits = Range()
        >>> slots = limits.start(torch.empty(0))
        >>> for batch in (torch.tensor([1.0, -2.0]), torch.tensor([3.0])):
        ...     slots = limits.update(slots, batch)
        >>> limits.result(slots)
        (-2.0, 3.0)
    """

    def start(self, value: Tensor) -> Tensor:
        """Return empty slots for values like this one: flat, float64, on the value's device."""
        ...

    def update(self, slots: Tensor, value: Tensor) -> Tensor:
        """Return the slots with one more value.

        The method must not write to `slots`, and it must read no number back from the device.
        Compiled code traces it: there it must consist of torch functions, without a branch on a
        number.
        """
        ...

    def merge(self, slots: Tensor, other: Tensor) -> Tensor:
        """Return the slots of all values of two sets of slots on one device."""
        ...

    def result(self, slots: Tensor) -> ResultT_co:
        """Make what the user reads from slots on the CPU."""
        ...
