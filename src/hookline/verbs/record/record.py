"""record: keep the values at the selected sites."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Never, NoReturn, Unpack, final, overload

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    LINE,
    Bound,
    Callback,
    CompiledRun,
    Ground,
    Line,
    Order,
    OutputTap,
    Pass,
    Passes,
    Report,
    Selection,
    Selector,
    Site,
    SplitCallback,
    Tap,
    Unversioned,
    aside,
    makes_new_memory,
    no_callback,
    ports_for,
)
from hookline.errors import SelectionError
from hookline.recordings import Recording
from hookline.verbs.record.gradients import KeepGradient, PlainGradTap
from hookline.verbs.record.keep import Keep, Keeper, checked, in_graph, is_plain
from hookline.verbs.record.to_store import StoreLine, store_line
from hookline.verbs.shared.verb_line import VerbLine


@final
class RecordLine(VerbLine[Line]):
    """A line that fills a recording: a context manager that gives it, or ended by `remove()`."""

    def __init__(self, line: Line, recording: Recording) -> None:
        super().__init__(line)
        self.recording = recording

    def __enter__(self) -> Recording:
        self._line.__enter__()
        return self.recording

    def __getitem__(self, key: object) -> Never:
        raise TypeError(
            "this is the line, which fills a recording.\nLook values up in that:"
            " with hl.record(...) as run: ..., or line.recording[...]."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(Recording, name):
            raise AttributeError(
                f"this is the line, which fills a recording, and it has no {name!r}.\nUse that of"
                f" the recording: with hl.record(...) as run: ..., or line.recording.{name}."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _ended(self, error: BaseException | None) -> None:
        self.recording.finish(self._line.report())

    def report(self) -> Report:
        """Report the sites that were attached, how often each fired, and why some never did."""
        return self._line.report()


@overload
def record(
    model: Ground,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    to: None = None,
    every_thread: bool = False,
    **options: Unpack[Keep],
) -> RecordLine: ...
@overload
def record(
    model: Ground,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    to: str | os.PathLike[str],
    every_thread: bool = False,
    **options: Unpack[Keep],
) -> StoreLine: ...
def record(
    model: Ground,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    to: str | os.PathLike[str] | None = None,
    every_thread: bool = False,
    **options: Unpack[Keep],
) -> RecordLine | StoreLine:
    """Record the values at the selected sites, while the block lasts.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with record(model, nn.Linear) as run:
        ...     _ = model(torch.zeros(4, 2))
        >>> run["0"].shape
        torch.Size([4, 3])

    The model computes what it would have computed, to the last bit. Values are kept as they are
    after edits. A value that an in-place operation changes later (`ReLU(inplace=True)`, `+=`) is
    never returned as if it were right: the look-up raises, and `copy=True` records it in time.

    Torch does not tell of every change: not of those by collectives, by fused optimizers and by
    kernels that update buffers. So values are copied that share memory with a parameter or buffer,
    DTensors and inference tensors; in a process group of several ranks, or where weights are
    sharded, all are. Writes past torch cannot be noticed: through `.data`, NumPy, DLPack,
    `untyped_storage()`, or by a kernel that hides them. Nor can `swap_tensors` of a recorded value.
    Where your code does that, give `copy=True`.

    Gradients are those of the values as they were at the site, after edits of the values and of the
    gradients; where none is needed, None. Call `backward()` inside the block.

        >>> with record(model, nn.ReLU, ports=("output", "grad_output")) as run:
        ...     model(torch.zeros(4, 2)).sum().backward()
        >>> run["1:grad_output"].shape
        torch.Size([4, 3])

    For more than memory holds, `to=` writes each pass to a store when the next one begins:

        >>> with record(model, nn.Linear, to=tmp_path / "acts"):
        ...     for _ in range(3):
        ...         _ = model(torch.zeros(4, 2))
        >>> hl.open(tmp_path / "acts")["0"].shape
        (12, 3)

    Args:
        model: the model, or tensors by name, `{"b": b}`, whose gradients are recorded. Hooks are
            attached now, and taken off at the end of the block.
        selector: which sites; as in `hl.select`. None is every module.
        ports: one or several of "output", "input", "grad_output", "grad_input" and "grad" (of
            parameters), for selectors that name no port. An input is the tensor, if that is all the
            module was called with, else a dict of its arguments by name; a gradient has the
            structure of the value it belongs to.
        to: a new folder, or a URL of fsspec, for a store that grows pass by pass: a row for each
            item of each pass. None keeps all passes in memory.
        every_thread: see every thread and async task. False: see the one that calls this, and what
            runs in a copy of its context.
        keep: what to keep of each value, as in `lambda t: t[:, -1]`; called with the value itself,
            for gradients with each tensor, as they arrive one by one. Sums, means, norms and
            powers of 16-bit floats are computed, and kept, in float32; autocast is off.
        device: where to keep tensors.
        dtype: the dtype of floating tensors as kept; others stay as they are.
        detach: False keeps the autograd graph, and with it the memory of the whole pass.
        copy: True copies every tensor, False none. None copies where torch cannot tell of changes.

    Returns:
        A line; `with ... as run` gives its `Recording`. Without `with`: `line.recording`, and
        `line.remove()` to end it. With `to=`, a line whose `store` is there after the block.

    Raises:
        SelectionError: the selector matches nothing, or a port is unknown.
        AttachError: the model cannot be hooked, or a dtype or device is none.
        SiteError: (when the model runs) a selected leaf is not in the value, or with `copy=True`
            a tensor is in an object that cannot be copied.
    """
    names = ports_for(model, ports)
    if to is not None:
        options = {"copy": True, **options}
    line, bare = start_recording(
        model, selector, "record", names, options, every_thread=every_thread
    )
    return line if to is None else store_line(bare, line.recording, to, options)


def start_recording(
    model: Ground,
    selector: Selector,
    name: str,
    ports: tuple[str, ...],
    options: Keep,
    after: Callable[[Site], None] | None = None,
    *,
    every_thread: bool = False,
) -> tuple[RecordLine, Line]:
    """Attach a recording line for a verb called `name`; also gives the bare line.

    `after`, if given, is called with a site when its value has been kept.
    """
    options = checked(name, options)
    line = Line(model, name=name, every_thread=every_thread, lenient=selector is None)
    selection = line.select(selector, ports)
    if after is not None:
        _refuse_gradients(name, selection)
    recorder = _Recorder(line, selection, options, after)
    line.tap(selection, recorder.bind, Order.RECORD)
    return RecordLine(line, recorder.recording), line


def _refuse_gradients(name: str, selection: Selection) -> None:
    back = next((site for site in selection if site.is_gradient), None)
    if back is not None:
        raise SelectionError(
            f"hl.{name} only runs forward, and {back} flows backward.\nUse hl.record(model,"
            f" {str(back)!r}), and call backward() inside the block."
        )


@final
class _Recorder:
    """Makes the recording of a line, and chooses what stands at each of its sites.

    Args:
        line: the line, which fills the recording.
        selection: the sites.
        options: what is kept.
        after: called with a site when its value has been kept.

    Attributes:
        recording: what is filled.
    """

    def __init__(
        self,
        line: Line,
        selection: Selection,
        options: Keep,
        after: Callable[[Site], None] | None,
    ) -> None:
        sites, places, nodes = selection.sites, selection.places(), line.layout.nodes
        unversioned = Unversioned(line.root, len(nodes)) if options.get("copy") is None else None
        self._unversioned = unversioned
        self._computing = frozenset(filter(makes_new_memory, line.layout.kinds))
        self._passes = line.passes
        self._after = after
        self._places = enumerate(places)  # what stands at each is asked for once, in their order
        self._is_fast = after is None and is_plain(options)
        self._kept = Keeper(options, unversioned)
        self._in_graph = in_graph(options)
        self._of_graph = Keeper({**options, "keep": None, "copy": False}, None)
        self._keeps_graph = not options.get("detach", True)
        self.recording = line.passes.sink = Recording(
            sites,
            _report_of(line, sites),
            tuple([(node.path, type(node.module).__name__) for node in nodes]),
            keeps_graph=self._keeps_graph,
            unversioned=unversioned,
        )

    def bind(self, site: Site) -> Bound:
        """Give what stands at the next site."""
        number, (_, node) = next(self._places)
        is_fast = self._is_fast and not site.leaf and site.call is None
        make = _FAST_TAPS.get(site.port) if is_fast else None
        if make is not None:
            return make(self, site, number, node)
        if site.is_gradient:
            return self._gradient(number, node)
        callback = _keep(number, self._kept, site)
        if self._after is not None:
            return _then(callback, self._after, site)
        if self._in_graph is None:
            return callback
        return SplitCallback(callback, self._in_graph, _keep(number, self._of_graph, site))

    def _gradient(self, number: int, node: Any) -> KeepGradient:
        parameter = getattr(node, "tensor", None)
        return KeepGradient(number, self._kept, parameter, keeps_graph=self._keeps_graph)

    def _plain_output(self, site: Site, number: int, node: Any) -> Tap:
        module = node.module
        if type(module) in self._computing and "forward" not in vars(module):
            unversioned, may_hand_on = None, False
        else:
            unversioned, may_hand_on = self._unversioned, _may_hand_on(module)
        return _PlainTap(
            site, self._passes, number, self._kept, unversioned, may_hand_on=may_hand_on
        )

    def _plain_gradient(self, site: Site, number: int, node: Any) -> Tap:
        return PlainGradTap(site, self._passes, self._gradient(number, node), number)


# The ports of which whole values, kept as they are, have a tap of their own.
_FAST_TAPS: dict[str, Callable[[_Recorder, Site, int, Any], Tap]] = {
    "output": _Recorder._plain_output,
    "grad_output": _Recorder._plain_gradient,
}


def _report_of(line: Line, sites: tuple[Site, ...]) -> Callable[[], Report]:
    """A line's report, without holding the line: its hooks hold the recording, and it goes when
    nobody holds it."""
    name, model_type = line.name, line.layout.name
    held = weakref.WeakMethod(line.report)

    def report() -> Report:
        found = held()
        if found is not None:
            return found()
        why = dict.fromkeys(sites, "its line was dropped, and nobody could end it")
        fired = tuple((site, 0) for site in sites)
        return Report(name, model_type, 0, 0, True, fired, why, frozenset())

    return report


@final
class _PlainTap(OutputTap):
    """Keeps a whole output, detached: `OutputTap.fire` and `_keep` in one, for speed.

    A call less is a fiftieth of what torch takes for a module with a hook. One function for all
    modules: Python runs a call that always meets the same one faster.

    Args:
        number: the site's.
        kept: keeps what is not kept the fast way.
        unversioned: tells whether an output may change without a word; None where none can, as of a
            module that returns memory of its own.
        may_hand_on: whether to look first if the value is the one that was just kept.
    """

    __slots__ = ("kept", "may_hand_on", "number", "unversioned")

    def __init__(
        self,
        site: Site,
        passes: Passes,
        number: int,
        kept: Keeper,
        unversioned: Unversioned | None,
        *,
        may_hand_on: bool,
    ) -> None:
        super().__init__(site, passes, no_callback, Order.RECORD)
        self.number = number
        self.kept = kept
        self.unversioned = unversioned
        self.may_hand_on = may_hand_on

    def fire_slowly(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep a nested value, or one that was seen outside of a pass, as any other tap does."""
        # Made here, since most taps never need it; an inert copy has none.
        if getattr(self, "callback", None) is no_callback:
            self.callback = _keep(self.number, self.kept, self.site)
        OutputTap.fire(self, module, args, output)

    def collect(self, current: Pass, run: CompiledRun) -> None:
        """Keep what compiled code has caught: copies, detached by it."""
        traced = self.traced
        if traced is not None and traced.caught is not None:
            caught, traced.caught = traced.caught, None
            if not run.is_again:
                self.fired += len(caught)
                for value in caught:
                    current.note((self.number, value, None))

    def fire(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook itself."""
        if is_dynamo_compiling():
            self.trace(output)
            return
        current = self.lane.current
        if current is None or type(output) is not Tensor:
            self.fire_slowly(module, args, output)
            return
        try:
            version = output._version
            # What was just kept as it is, as of an identity, needs not be asked again.
            if self.unversioned is not None and (
                not self.may_hand_on or not (log := current.log) or log[-1][1] is not output
            ):
                known = current.unversioned
                if known is None:
                    known = self.unversioned.look(current)
                # To ask where its memory begins takes twice as long.
                if output.storage_offset() or output.data_ptr() >> LINE in known:
                    self.fire_slowly(module, args, output)
                    return
        except RuntimeError:  # it has no version, or no memory of its own
            self.fire_slowly(module, args, output)
            return
        self.fired += 1
        if output.requires_grad:
            output = output.detach()
        current.note((self.number, output, version))


def _may_hand_on(module: nn.Module) -> bool:
    """Tell whether a module often returns what another module has just returned.

    A container does, and layers such as `nn.Identity`; a layer of a user's own class computes.
    """
    is_of_torch = type(module).__module__.startswith("torch.")
    return is_of_torch or next(module.children(), None) is not None


def _keep(number: int, kept: Keeper, site: Site) -> Callback:
    def callback(current: Pass, value: Any) -> None:
        if current.region is None:
            found, was = kept(current, value, site)
        else:
            with aside(current.region):
                found, was = kept(current, value, site)
        current.note((number, found, was))

    return callback


def _then(callback: Callback, after: Callable[[Site], None], site: Site) -> Callback:
    def see_then(current: Pass, value: Any) -> None:
        callback(current, value)
        after(site)

    return see_then
