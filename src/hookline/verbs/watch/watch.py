"""Print each module as it runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, TextIO, final

import torch
from torch import Tensor, nn

from hookline.display.text import (
    escape_to_one_line,
    listed,
    name_without_torch,
    type_and_line,
)
from hookline.display.wrapped_text import fold_line
from hookline.engine import (
    BlockwiseCallback,
    GradientCallback,
    Line,
    ModuleNode,
    Order,
    Pass,
    PendingGradient,
    QueryBlocks,
    Report,
    Selection,
    Selector,
    Site,
    SplitCallback,
    check_ports,
    hide_from_dir,
    is_scripted,
    local_shards,
    outside_checkpoint,
    path_text,
    snapshot_detached,
    unwrap_all_transforms,
)
from hookline.engine.pytree import describe, tree
from hookline.statistics.value_statistics import BLOCK_NUMEL, mean_and_std
from hookline.util.stopwatch import STOPWATCH
from hookline.verbs.shared.failing_module import find_failing_module
from hookline.verbs.shared.finalizing_line import FinalizingLine
from hookline.verbs.shared.refused_ports import refuse_ignored_ports
from hookline.verbs.watch.call_times import ClockTap, RunningCalls, TimedCall


@final
@hide_from_dir("start")
class Watch(FinalizingLine[Line]):
    """A line that prints each module as it runs: a context manager, or ended by `remove()`."""

    def __init__(self, line: Line, model: nn.Module, file: TextIO | None) -> None:
        super().__init__(line)
        self._model: nn.Module | None = model
        self._printer = _Printer(file)
        self._optional = False

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def _before_removal(self, error: BaseException | None) -> None:
        if error is not None and self._model is not None:
            failing = find_failing_module(self._model, error)
            if failing is not None:
                self._printer.print_line(f"!! {failing}, raised {type_and_line(error)}")

    def _after_removal(self, error: BaseException | None) -> None:
        self._model = None

    def report(self) -> Report:
        """Report the sites that were matched and attached, and how often each fired."""
        full = self._line.report()
        fired = {
            site: count
            for site, count in full.fired
            if site.port != "input" and not (self._optional and site.is_gradient and not count)
        }
        why = {site: full.why[site] for site, count in fired.items() if not count}
        return replace(full, sites=tuple(fired), counts=tuple(fired.values()), why=why)

    def start(self, selection: Selection, *, optional: bool) -> None:
        """Attach the taps: an input tap starts a module's clock, an output tap prints the module.

        Args:
            optional: whether a gradient that never arrives is left out of the report.
        """
        self._optional = optional
        places = list(selection.places)
        starts = [
            (replace(site, port="input", leaf=()), node)
            for site, node in places
            if site.port == "output" and isinstance(node, ModuleNode)
        ]
        depth = {site: site.path.count(".") for site, _ in places}
        width = max((len(site.path) + 2 * depth[site] + 3 for site, _ in places), default=8)
        label_width = min(width, 44)
        printer = self._printer  # hooks that held self would keep the line alive

        def bind(site: Site) -> Any:
            if site.is_gradient:
                return _GradientPrinter(printer, site, label_width, optional)
            if site.port == "input":
                return BlockwiseCallback(
                    SplitCallback(printer.store_inputs_text, _keep_nothing, _print_nothing)
                )
            compiled = printer.compiled_output_printer(site, label_width)
            return BlockwiseCallback(
                SplitCallback(
                    printer.output_printer(site, label_width), snapshot_detached, compiled
                )
            )

        line = self._line
        with line.undo_on_error() as placements:
            line.attach_taps(Selection(line.module_tree, [*places, *starts]), bind, Order.RECORD)
            for node in {id(node): node for _, node in starts}.values():
                if not is_scripted(node.module):
                    clock = ClockTap(line.passes, printer.running, STOPWATCH)
                    placements.register_taps([(clock, node)])


@final
class _Printer:
    """Print inputs, outputs and gradients, one line for each module."""

    __slots__ = ("_file", "running")

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.running = RunningCalls()

    def store_inputs_text(self, current: Pass, value: Any) -> None:
        """Note the structure of the inputs of the call that has just begun."""
        if self.running.calls:
            call = self.running.calls[-1]
            call.inputs = _structure_text(value)
            call.n_bytes = sum(
                tensor.numel() * tensor.itemsize
                for _, tensor in tree.tensors(value)
                if tensor.layout is torch.strided and not tensor.is_nested
            )

    def output_printer(self, site: Site, width: int) -> Any:
        """Return the callback that prints an output."""
        name = path_text(site.path)

        def callback(current: Pass, value: Any) -> None:
            calls = self.running.calls
            call = calls[-1] if calls and calls[-1].has_run else None
            label = "  " * (len(calls) - (call is not None)) + name
            if _is_on_accelerator(value.arguments if isinstance(value, QueryBlocks) else value):
                for running in calls:
                    running.launches = True
            with outside_checkpoint(current.region):
                value_text = _value_text(value)
            inputs = "?" if call is None else call.inputs
            duration = "" if call is None else _duration_text(call)
            self.print_line(
                f"{label:{width}}  {site.module_type:18} {inputs} -> {value_text}{duration}"
            )

        return callback

    def compiled_output_printer(self, site: Site, width: int) -> Any:
        """Return the callback that prints an output of compiled code, without time or order."""
        label = "  " * (site.path.count(".") + bool(site.path)) + path_text(site.path)

        def callback(current: Pass, value: Any) -> None:
            for call in self.running.calls:
                call.has_compiled = True
            self.print_line(f"{label:{width}}  {site.module_type:18} -> {_value_text(value)}")

        return callback

    def print_line(self, text: str) -> None:
        """Print a line in one write: another thread may print at the same time."""
        file = self._file if self._file is not None else sys.stdout
        print(f"{fold_line(escape_to_one_line(text), file)}\n", end="", file=file)


@final
class _GradientPrinter(GradientCallback):
    """Print the gradients at one site."""

    __slots__ = ("_printer", "_site", "_width", "optional")

    def __init__(self, printer: _Printer, site: Site, width: int, optional: bool) -> None:
        self._printer = printer
        self._site = site
        self._width = width
        self.optional = optional

    def on_gradient(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Print the gradient of one tensor."""
        site, name = self._site, f"< {path_text(self._site.path)}"
        head = f"{name:{self._width}}  {site.module_type:18}"
        self._printer.print_line(f"{head} {site.port} {_value_text(grad)}")


def watch(
    model: nn.Module,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] | None = None,
    file: TextIO | None = None,
    every_thread: bool = False,
) -> Watch:
    """Print each module as it runs: depth, path, type, shapes, dtype, mean, std, time.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> printed = io.StringIO()
        >>> with hl.watch(model, file=printed):
        ...     _ = model(torch.zeros(4, 2))
        >>> print(printed.getvalue().partition("  mean")[0].strip())
        0   Linear             [4, 2] -> [4, 3] float32

    A module is printed after it has run, so a container comes after its submodules. The indentation
    is the depth of the call. In backward, the gradient of each module's output is printed when it
    arrives, marked `<`, so the last module comes first. If a module raises, the last printed text
    names the module and its inputs.

    Statistics are those of the first floating tensor of a value, in float64 on the CPU and in
    float32 elsewhere. For a nested tensor they are over all its parts. Under `vmap`, shapes are
    those of one example, and statistics are over all examples.

    The time, in ms, is that of the module without hookline. It leaves out hookline's hooks,
    statistics and printing, also those of other lines and of inner modules. It includes edits and
    hooks of other code. Hooks change what is in the caches. This changes a call by up to 0.03 ms,
    and by the time of reading its inputs from memory. A time that this could change by more than
    a tenth is marked `~`. On an accelerator, the time is that of launching the work, and
    `to launch` is printed after it.

    Modules in compiled code are printed after that code has run, in registration order, without
    inputs and times. Modules that contain compiled code are printed without a time.

    Args:
        model: the model.
        selector: which modules, as in `hl.select`. None is every module.
        ports: what is printed: "output" (with the input's shape and the time), "grad_output",
            "grad_input" or "grad". None prints outputs, and their gradients if backward runs.
        file: the file to print to; None is the standard output. Lines that are wider than a
            terminal are folded; in other files, each module has one line.
        every_thread: True prints modules of every thread and async task. False prints those of the
            calling thread or task, and of code that runs in a copy of its context.

    Returns:
        A line. Use it in a `with` block, or end it with `line.remove()`.

    Raises:
        SelectionError: the selector matches nothing, or a port is unknown.
        AttachError: `model` is not a model, or cannot be hooked.
    """
    line = Line(model, name="watch", every_thread=every_thread)
    line.options.lenient = selector is None
    watching = Watch(line, model, file)
    default_ports = ("output", "grad_output") if ports is None else check_ports(ports)
    refuse_ignored_ports(ports or default_ports, selector)
    watching.start(line.select(selector, default_ports), optional=ports is None)
    return watching


def _keep_nothing(value: Any) -> None:
    """Keep nothing of an input in compiled code."""


def _print_nothing(current: Pass, value: Any) -> None:
    """Print nothing of an input of compiled code."""


def _structure_text(value: Any) -> str:
    blocks = value.get("value") if isinstance(value, dict) else None
    if isinstance(blocks, QueryBlocks):  # of `@pattern` or `@scores`
        return describe.shape(blocks)
    return describe.shape_or_structure(local_shards(value))


def _value_text(value: Any) -> str:
    """Describe a value: its shape and dtype, and the mean and std of its first floating tensor.

    Other tensors of it are named if they hold NaN or infinities.
    """
    if isinstance(value, QueryBlocks):
        return _blocks_text(value)
    value = local_shards(value)  # nothing here communicates with other ranks
    text = describe.shape_or_structure(value)
    tensors = tree.tensors(value)
    floating = [pair for pair in tensors if pair[1].is_floating_point() and not pair[1].is_meta]
    if not floating:
        return text
    (_, first), *rest = floating
    dtype = name_without_torch(first.dtype)
    try:
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            mean, std = _mean_and_std(unwrap_all_transforms(first.detach()))
            broken = [
                describe.leaf_text(leaf)
                for leaf, tensor in rest
                if tensor is not first and not _is_finite(unwrap_all_transforms(tensor.detach()))
            ]
    except Exception:  # a sparse or fake tensor has no numbers to show; the model must go on
        return f"{text} {dtype}"
    where = f"  NaN or inf in {listed(broken, _N_BROKEN)}"
    return f"{text} {dtype}  mean {mean:.4g}  std {std:.4g}" + where * bool(broken)


def _blocks_text(blocks: QueryBlocks) -> str:
    """Describe scores or a pattern, which are computed in blocks of queries."""
    text = f"{describe.shape(blocks)} {str(blocks.dtype).removeprefix('torch.')}"
    means = []

    def parts() -> Iterator[Tensor]:
        for block in blocks:
            numbers = unwrap_all_transforms(local_shards(block)).reshape(-1)
            if numbers.device.type == "mps":  # it has no float64
                numbers = numbers.cpu()
            means.append(numbers.mean(dtype=torch.float64).item())
            yield from map(Tensor.double, torch.split(numbers, BLOCK_NUMEL))
            del block, numbers  # frees them, before the next block is made

    try:
        with torch.no_grad():
            mean, std = mean_and_std(parts())
    except Exception:  # a fake tensor has no numbers to show; the model must go on
        return text
    if not math.isfinite(mean):
        mean, std = sum(means), math.nan  # masked scores are -inf
    return f"{text}  mean {mean:.4g}  std {std:.4g}"


_N_BROKEN = 3  # leaves that are named
# Deviations whose squares neither vanish nor overflow in float32.
_SMALL, _LARGE = 1e-15, 1e15


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_nested:
        return all(bool(part.isfinite().all()) for part in tensor.unbind())
    return bool(tensor.isfinite().all())


def _mean_and_std(tensor: Tensor) -> tuple[float, float]:
    """Compute the mean and the standard deviation of all elements, in float64 on the CPU.

    `torch.std_mean` takes ten times as long on the CPU. A long hook also slows down the model after
    it, because more of the model's data leaves the caches. On another device it squares in float32.
    """
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if not tensor.numel():
        return math.nan, math.nan  # torch would warn about the deviation of no elements
    if tensor.device.type != "cpu":
        wide = tensor if tensor.dtype is torch.float64 else tensor.float()
        std, mean = (part.item() for part in torch.std_mean(wide, correction=0))
        if _SMALL < std < _LARGE:
            return mean, std
        tensor = tensor.cpu()
    blocks = torch.split(tensor.reshape(-1), BLOCK_NUMEL)
    mean, std = mean_and_std(block.double() for block in blocks)
    if math.isfinite(mean):
        return mean, std
    return tensor.double().mean().item(), math.nan  # inf if all infinities have one sign


def _is_on_accelerator(value: Any) -> bool:
    """Tell whether a value is computed by a device that Python does not wait for."""
    return any(tensor.device.type not in ("cpu", "meta") for _, tensor in tree.tensors(value))


def _duration_text(call: TimedCall) -> str:
    """Format the time of a call; empty where it was not timed."""
    if call.seconds is None:
        return ""
    mark = "" if call.is_exact else "~"
    return f"  {mark}{call.seconds * 1e3:.3f} ms{' to launch' if call.launches else ''}"
