"""Trace one run of a model: every value, the call that made it, and the sites where it is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline.engine import (
    Line,
    Order,
    Site,
    TracingAttachError,
    is_wrapped,
    own_buffers,
    own_parameters,
    run_at_trace_time,
    storage_address,
    without_function_modes,
)
from hookline.engine.function_names import functions_by_name, selector_name
from hookline.engine.pytree import tree
from hookline.verbs.shared.model_state import tensor_version
from hookline.verbs.shared.run_model import call_model, copy_inputs

SUMS = {"add", "add_", "iadd", "radd"}
SCALES = {"mul", "mul_", "imul", "rmul", "div", "div_", "idiv", "true_divide", "rdiv"}


def port_or_operation(place: Site) -> str:
    """Return "operation" for the output of a function of torch, or else the port of a module."""
    return "operation" if "@" in place.path else place.port


@final
@dataclass(eq=False, slots=True, repr=False)
class Value:
    """One value of a run. A tensor that is written to in place becomes another value."""

    tensor: Tensor  # a copy of the numbers, or the numbers of a weight
    maker: Event | None = None  # the call that made the value; None for inputs and weights
    is_constant: bool = False  # whether the value is the same for every input, such as a weight
    # Where a weight is found: its module and its name; None for other values.
    weight: tuple[nn.Module, str] | None = None
    # An earlier value of the same numbers in the same order, such as the input of a view.
    like: Value | None = None
    # The sites where the value is seen, each with the number of the call.
    places: list[Site] = field(default_factory=list)

    @property
    def origin(self) -> Value:
        """Return the earliest value of the same numbers."""
        return self.equal_values()[-1]

    def equal_values(self) -> list[Value]:
        """Return the values of the same numbers before this one, this one first."""
        chain = [self]
        while chain[-1].like is not None:
            chain.append(chain[-1].like)
        return chain


@final
@dataclass(eq=False, slots=True, repr=False)
class Event:
    """One call of a function of torch; or of a module whose calls torch does not show."""

    index: int  # the number of the event in the run
    path: str  # the module whose forward makes the call
    name: str  # the name of the function; "(module)" for a module
    inputs: list[Value]  # the values that it gets, weights and constants included
    outputs: list[Value] = field(default_factory=list)  # the values that it makes
    function: Any = None  # the function; None for a module
    arguments: Any = ()  # its arguments, with values in place of tensors
    writes: bool = False  # whether it writes to one of its inputs

    @property
    def varying(self) -> list[Value]:
        """Return the inputs that are no constants."""
        return [value for value in self.inputs if not value.is_constant]


@final
@dataclass(eq=False, slots=True, repr=False)
class ModuleCall:
    """One call of a module: when it began and ended, and its values by leaf."""

    path: str
    begin: int
    end: int = -1
    inputs: dict[tree.Leaf, Value] = field(default_factory=dict)
    outputs: dict[tree.Leaf, Value] = field(default_factory=dict)


@run_at_trace_time
def _refuse_flex_attention(function: Any) -> None:
    """Refuse the kernel that compiles itself: a trace sees no call of it."""
    if selector_name(function) == "flex_attention":
        raise TracingAttachError(
            "hl.anatomy must be given a model whose attention it can follow, got flex_attention,"
            " which compiles itself.\nBuild the model with another attention; of transformers:"
            " attn_implementation='sdpa'."
        )


@final
class Trace(TorchFunctionMode):
    """The values, calls of functions and calls of modules of one run.

    Values inside `torch.func.vmap` and the like are left out: they have neither memory nor numbers.

    Attributes:
        events: the calls of torch's functions, in order.
        calls: the calls of each module, by its path.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.calls: dict[str, list[ModuleCall]] = {}
        self._running: list[ModuleCall] = []
        self._values: dict[tuple[int, int | None], Value] = {}
        self._alive: list[Tensor] = []
        self._writers: dict[int, Value] = {}
        self._n_calls: Counter[str] = Counter()  # by the path of an operation
        self._weights = {
            id(tensor): (module, name)
            for module in model.modules()
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
        }
        self._names = functions_by_name()

    # -- values -----------------------------------------------------------------------------------

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value that a tensor holds now."""
        key = id(tensor), tensor_version(tensor)
        value = self._values.get(key)
        if value is None:
            writer = self._writers.get(_memory_id(tensor))
            value = self._new_value(tensor)
            if writer is not None:  # a view of what was written to
                value.maker, value.is_constant = writer.maker, writer.is_constant
        return value

    def _value_if_tensor(self, part: Any) -> Any:
        return self.value_of(part) if isinstance(part, Tensor) else part

    def _new_value(self, tensor: Tensor) -> Value:
        weight = self._weights.get(id(tensor))
        numbers = tensor.detach().clone() if weight is None else tensor.detach()
        value = Value(numbers, is_constant=weight is not None, weight=weight)
        self._values[id(tensor), tensor_version(tensor)] = value
        self._alive.append(tensor)  # no other tensor gets its id
        return value

    # -- calls of functions -----------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and note the call."""
        kwargs = kwargs or {}
        if is_dynamo_compiling():
            _refuse_flex_attention(func)
        given = [tensor for _, tensor in tree.tensors((args, kwargs))]
        if not self._running or any(map(is_wrapped, given)):
            return func(*args, **kwargs)
        inputs = [self.value_of(tensor) for tensor in given]
        arguments = _map_nested(self._value_if_tensor, (args, kwargs))
        versions = [tensor_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        written = [t for t, v in zip(given, versions, strict=True) if tensor_version(t) != v]
        made = [(leaf, t) for leaf, t in tree.tensors(result) if not is_wrapped(t)]
        if made or written:
            event = self._add_event(func, inputs, made, written)
            event.function, event.arguments, event.writes = func, arguments, bool(written)
        return result

    def _add_event(self, func: Any, inputs: list[Value], made: Any, written: list[Tensor]) -> Event:
        path = self._running[-1].path if self._running else ""
        name = selector_name(func)
        event = Event(len(self.events), path, name, list(dict.fromkeys(inputs)))
        self.events.append(event)
        operation = f"{path}@{name}"
        number = self._n_calls[operation]
        self._n_calls[operation] += 1
        is_constant = all(value.is_constant for value in inputs)
        targets = {id(tensor): (leaf, tensor) for leaf, tensor in made}
        targets.update({id(t): ((), t) for t in written if id(t) not in targets})
        for leaf, tensor in targets.values():
            value = self._values.get((id(tensor), tensor_version(tensor)))
            if value is None:
                value = self._new_value(tensor)
                value.maker, value.is_constant = event, is_constant
                # A sum or scale may return what it gets by its numbers alone, such as ones.
                is_chance = name in SUMS | SCALES and len(event.inputs) > 1
                value.like = None if is_chance else _equal_input(value, inputs)
                event.outputs.append(value)
            if any(tensor is target for target in written):
                self._writers[_memory_id(tensor)] = value
            if name in self._names and not value.is_constant:
                value.places.append(Site(operation, "output", leaf, number))
        return event

    # -- calls of modules -------------------------------------------------------------------------

    def make_callback(self, site: Site) -> Any:
        """Return the callback of a port of a module."""

        note = self._enter_module if site.port == "input" else self._leave_module

        def callback(_: Any, value: Any) -> None:
            with without_function_modes():
                note(site, value)

        return callback

    def _enter_module(self, site: Site, given: Any) -> None:
        module_call = ModuleCall(site.path, len(self.events))
        self.calls.setdefault(site.path, []).append(module_call)
        self._running.append(module_call)
        module_call.inputs = dict(self._add_sites_to_values(site, given))

    def _leave_module(self, site: Site, result: Any) -> None:
        module_call = self._running.pop()
        module_call.end = len(self.events)
        given = list(module_call.inputs.values())
        module_call.outputs = dict(self._add_sites_to_values(site, result))
        made = [
            value
            for value in module_call.outputs.values()
            if value.maker is None and len(value.places) == 1 and not value.is_constant
        ]
        if made and given and not any(value in given for value in made):
            # One call of the module, because torch did not show what it did.
            event = Event(len(self.events), site.path, "(module)", given, made)
            self.events.append(event)
            for value in made:
                value.maker = event

    def _add_sites_to_values(self, site: Site, values: Any) -> Iterator[tuple[tree.Leaf, Value]]:
        number = len(self.calls[site.path]) - 1
        for leaf, tensor in tree.tensors(values):
            if not is_wrapped(tensor):
                value = self.value_of(tensor)
                value.places.append(Site(site.path, site.port, leaf, number))
                yield leaf, value

    def sites_of_kind(self, value: Value, kind: str, path: str | None = None) -> list[str]:
        """Return where a value is seen as a kind of place: of one module, or of any."""
        return [
            self.site_text(place)
            for place in value.places
            if port_or_operation(place) == kind and path in (None, place.path)
        ]

    def tensor_by_site(self) -> dict[str, Tensor]:
        """Return the numbers that each site had."""
        return {
            self.site_text(place): value.tensor
            for value in self._values.values()
            for place in value.places
        }

    def site_text(self, place: Site) -> str:
        """Return the text of a site; the number of the call only where there are several."""
        n_calls = self._n_calls[place.path] or len(self.calls[place.path])
        return str(place if n_calls > 1 else replace(place, call=None))


def replay_events(
    events: Iterable[Event], tensor_by_id: dict[int, Tensor], wanted: Value
) -> Tensor:
    """Compute a value again, from other numbers.

    Args:
        events: the calls that lead to the value, in order.
        tensor_by_id: the other numbers, by the ids of the values that they stand for.
        wanted: the value.
    """
    numbers = dict(tensor_by_id)

    def number(part: Any) -> Any:
        return numbers.get(id(part), part.tensor) if isinstance(part, Value) else part

    def copied(part: Any) -> Any:
        return number(part).clone() if isinstance(part, Value) else part

    for event in events:
        args, kwargs = _map_nested(copied if event.writes else number, event.arguments)
        result = event.function(*args, **kwargs)
        made = [tensor for _, tensor in tree.tensors(result)]
        for place, value in enumerate(event.outputs):
            numbers[id(value)] = made[place] if place < len(made) else args[0]
    return numbers[id(wanted)]


def replay_by_token(
    events: Sequence[Event],
    given: Sequence[tuple[Value, Tensor]],
    wanted: Value,
    weight_by_id: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Compute a value again from other tokens, where each token is computed alone.

    The tokens are laid out in the shape that the values had, because calls may name this shape.

    Args:
        events: the calls that lead to the value, in order.
        given: the values, each with other numbers.
        wanted: the value.
        weight_by_id: numbers in place of those of the run, by the ids of the values.
    """
    places, shape = given[0][0].tensor.shape[:-1], given[0][1].shape[:-1]
    rows = [(value, numbers.flatten(0, -2)) for value, numbers in given]
    results = []
    for start in range(0, shape.numel(), places.numel()):
        slots = torch.arange(start, start + places.numel(), device="cpu") % shape.numel()
        parts = {id(value): own[slots].reshape(value.tensor.shape) for value, own in rows}
        result = replay_events(events, {**(weight_by_id or {}), **parts}, wanted)
        if result.shape[:-1] != places and result.shape[:-1] == places[::-1]:
            result = result.transpose(0, 1)  # tokens came first
        results.append(result.flatten(0, -2))
    computed = torch.cat(results)[: shape.numel()]
    return computed.reshape(*shape, *computed.shape[1:])


def _map_nested(function: Any, part: Any) -> Any:
    if isinstance(part, tuple | list):
        return type(part)([_map_nested(function, each) for each in part])
    if isinstance(part, dict):
        return {key: _map_nested(function, each) for key, each in part.items()}
    return function(part)


def _memory_id(tensor: Tensor) -> int:
    return storage_address(tensor) or id(tensor)  # a wrapper, as of torchao, has no memory


def _equal_input(value: Value, inputs: Iterable[Value]) -> Value | None:
    """Return the input that has the same numbers in the same order."""
    new = value.tensor
    if value.is_constant or not new.is_floating_point():
        return None
    for other in inputs:
        old = other.tensor
        is_alike = old.numel() == new.numel() and old.is_floating_point()
        if is_alike and torch.equal(old.flatten().to(new.dtype), new.flatten()):
            return other
    return None


def trace_model(model: nn.Module, inputs: Any) -> Trace:
    """Run a model, and trace its values."""
    trace, line = Trace(model), Line(model, name="anatomy")
    line.options.quiet = line.options.lenient = True
    with line:
        line.attach_taps(line.select(None, ("input", "output")), trace.make_callback, Order.RECORD)
        with trace:
            call_model(model, copy_inputs(inputs))
    return trace
