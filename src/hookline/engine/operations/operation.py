"""Hook the functions of torch that a module's own forward calls.

An `Operation` is a module that stands for the calls of one function. Its forward is the function.
While the module around it runs, a function mode of torch hands the calls of the function to the
operation, and torch calls the operation's hooks.
"""

from __future__ import annotations

import functools
from typing import Any, final

from torch import Tensor, nn

from hookline.engine.function_names import Function, argument_names
from hookline.engine.torch_private.graph.function_modes import method_name_for_dynamo
from hookline.engine.torch_private.hooks import hook_dict


@final
class Operation(nn.Module):
    """The calls of one function in the forward of a module. Hooks on the operation see the calls.

    Args:
        name: the name of the function.

    Attributes:
        writes: whether the function writes to its first argument, as `relu_` does.
        place_of_inplace: the place of the argument `inplace`, if the function has one.
        may_change: whether a hook may change the arguments or the result.
        needs_graph: whether a hook needs the graph of autograd to pass through the value.
        takes_blocks: whether all hooks take an attention pattern in blocks of queries.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.writes = False
        self.may_change: bool = False
        self.needs_graph: bool = False
        self.takes_blocks: bool = False
        self.place_of_inplace: int | None = None
        self._on_graph: list[Any] = []  # the owners of the hooks that need the graph

    def forward(self, value: Any) -> Any:
        """Return the value: the forward of an operation whose value is computed elsewhere."""
        return value

    def with_function(self, function: Function) -> Operation:
        """Return a copy whose forward is this function. The copy shares the hooks."""
        copy = nn.Module.__new__(Operation)
        copy.__dict__.update(self.__dict__)
        copy.__dict__["forward"] = make_traceable(function)
        copy.writes = _writes_first_argument(function.__name__)
        names = argument_names(function).names
        copy.place_of_inplace = names.index("inplace") if "inplace" in names else None
        return copy

    def update_hook_needs(self) -> None:
        """Look at the hooks, which have changed."""
        owners = [
            getattr(hook, "__self__", None)
            for kind in _KINDS
            for hook in list(hook_dict(self, kind).values())
        ]
        self.may_change = any(getattr(owner, "changes_values", True) for owner in owners)
        self._on_graph = [owner for owner in owners if getattr(owner, "needs_graph", True)]
        self.needs_graph = bool(self._on_graph)
        self.takes_blocks = all(getattr(owner, "takes_blocks", False) for owner in owners)

    def needs_graph_in_thread(self) -> bool:
        """Tell whether a hook needs the graph in this thread: most lines see only their own."""
        lines = [getattr(owner, "passes", None) for owner in self._on_graph]
        return any(passes is None or passes.sees_context_or_backward() for passes in lines)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function, and write a changed result to where the function writes."""
        target = self.written_tensor(args, kwargs) if self.may_change else None
        if not isinstance(target, Tensor):
            return self(*args, **kwargs)
        if args and args[0] is target:
            # Backward may need what the function itself wrote.
            new = self(target.clone(), *args[1:], **kwargs)
        else:
            new = self(*args, **kwargs)
        return target.copy_(new)

    def written_tensor(self, args: Any, kwargs: Any) -> Any:
        """Return the tensor that a call writes to; None for most calls.

        A statement such as `x.relu_()` uses this tensor afterwards, and not the call's result.
        """
        if "out" in kwargs:
            return kwargs["out"]
        place = self.place_of_inplace
        is_told = place is not None and (
            kwargs.get("inplace", False) or (len(args) > place and args[place])
        )
        if not is_told and not self.writes:
            return None
        return args[0] if args else kwargs.get("input")

    @property
    def is_hooked(self) -> bool:
        """Tell whether the operation has hooks."""
        return any(hook_dict(self, kind) for kind in _KINDS)

    def extra_repr(self) -> str:
        """Return the name of the function: for `repr`."""
        return self.name


_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


@functools.cache
def make_traceable(function: Function) -> Function:
    """Return a function that dynamo can trace in place of this one, most often itself."""
    name = method_name_for_dynamo(function)
    if not name:
        return function

    @functools.wraps(function)
    def method(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(input, name)(*args, **kwargs)

    return method


def _writes_first_argument(name: str) -> bool:
    """Tell whether a function of this name writes to its first argument, as `relu_` does."""
    if name.startswith("__"):
        return name[2] == "i" and hasattr(Tensor, f"__{name[3:]}")  # x &= y, but not ~x
    return name.endswith("_")
