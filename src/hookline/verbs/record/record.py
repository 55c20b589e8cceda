"""Record the values at the selected sites."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Never, NoReturn, Unpack, final, overload

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    CACHE_LINE_BITS,
    BlockwiseCallback,
    Bound,
    Callback,
    CompiledRun,
    Line,
    Order,
    OutputTap,
    Pass,
    Report,
    Selection,
    Selector,
    Site,
    SplitCallback,
    Tap,
    UnversionedMemory,
    do_nothing,
    is_uncompiled_leaf,
    outside_checkpoint,
    ports_for,
    returns_new_memory,
)
from hookline.engine.run_settings import SettingsReader
from hookline.errors import SelectionError, check_option_names, warn
from hookline.recordings import Recording
from hookline.verbs.record.by_query import ByQuery
from hookline.verbs.record.gradient_keepers import GradientKeeper, PlainGradTap
from hookline.verbs.record.keep import (
    Keeper,
    KeepOptions,
    check_keep_options,
    compiled_keep_function,
    keeps_plain_values,
)
from hookline.verbs.record.to_store import StoreLine, make_store_line
from hookline.verbs.shared.enclosing_generate import is_assisted, may_generate, n_beams
from hookline.verbs.shared.finalizing_line import FinalizingLine
from hookline.verbs.shared.refused_ports import refuse_ignored_ports


@final
class RecordLine(FinalizingLine[Line]):
    """A line that fills a recording; `with` gives the recording, and `remove()` ends the line."""

    def __init__(self, line: Line, recording: Recording) -> None:
        super().__init__(line)
        self.recording = recording

    def __enter__(self) -> Recording:
        self._line.__enter__()
        return self.recording

    def __getitem__(self, key: object) -> Never:
        raise TypeError(
            "a value must be looked up in the recording, got the line that fills it.\nLook it up"
            " there: with hl.record(...) as run: run[...], or line.recording[...]."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and name in dir(self.recording):
            raise AttributeError(
                f"a line has no {name!r}; its recording has.\nUse that of the recording:"
                f" with hl.record(...) as run: run.{name}, or line.recording.{name}."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _after_removal(self, error: BaseException | None) -> None:
        self.recording.finish(self._line.report())

    def report(self) -> Report:
        """Report the sites that were attached, how often each fired, and why some never did."""
        return self._line.report()


@overload
def record(
    model: nn.Module | Mapping[str, Tensor],
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    to: None = None,
    every_thread: bool = False,
    **options: Unpack[KeepOptions],
) -> RecordLine: ...
@overload
def record(
    model: nn.Module | Mapping[str, Tensor],
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    to: str | os.PathLike[str],
    every_thread: bool = False,
    **options: Unpack[KeepOptions],
) -> StoreLine: ...
def record(
    model: nn.Module | Mapping[str, Tensor],
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    to: str | os.PathLike[str] | None = None,
    every_thread: bool = False,
    **options: Unpack[KeepOptions],
) -> RecordLine | StoreLine:
    """Record the values at the selected sites, while the block lasts.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.record(model, nn.Linear) as run:
        ...     _ = model(torch.zeros(4, 2))
        >>> run["0"].shape
        torch.Size([4, 3])

    The model computes the same numbers as without recording, to the last bit. Values are recorded
    after edits. If an in-place operation (`ReLU(inplace=True)`, `+=`) changes a recorded tensor
    later, looking the value up raises `OverwrittenError`. Record a copy with `copy=True` to keep
    such values.

    hookline notices changes by torch's version counter (`tensor._version`). Collectives, fused
    optimizers, CUDA graphs and kernels that update buffers change tensors and leave the counter as
    it is. So hookline copies a tensor where such a change is possible:

    - tensors that share memory with a parameter or buffer, DTensors and inference tensors
    - all tensors, in a process group of several ranks, where weights are sharded, or where compiled
      code makes CUDA graphs (`mode="reduce-overhead"`)

    hookline cannot notice writes that bypass torch: through `.data`, NumPy, DLPack or
    `untyped_storage()`, or by a custom kernel that does not declare what it writes. It cannot
    notice `swap_tensors` on a recorded tensor either. Give `copy=True` where your code does that.

    A recorded gradient is the gradient with respect to the value as it was at the site: after
    edits, and before later in-place operations. It is recorded after edits of gradients, and is
    None where the value requires no gradient. Call `backward()` inside the block.

    All uses of a tensor count, with three exceptions. Of an input of the model itself, only uses in
    this run count. Of a leaf tensor that a module inside the model receives or returns, only uses
    through this module count; inside a list, dict or object argument its gradient is None. A view
    among tensors by name has no gradient if it or its base is written to later.

    Recording changes no bit of the model's gradients, but for such a leaf, as of `spectral_norm`:
    autograd sums its gradient module call by module call, which may round otherwise.

        >>> with hl.record(model, nn.ReLU, ports=("output", "grad_output")) as run:
        ...     model(torch.zeros(4, 2)).sum().backward()
        >>> run["1:grad_output"].shape
        torch.Size([4, 3])

    For more than memory holds, `to=` writes each pass to a store when the next one begins:

        >>> with hl.record(model, nn.Linear, to=tmp_path / "acts"):
        ...     for _ in range(3):
        ...         _ = model(torch.zeros(4, 2))
        >>> hl.open(tmp_path / "acts")["0"].shape
        (12, 3)

    Args:
        model: the model. Or tensors by name, `{"b": b}`, whose gradients are recorded. Hooks are
            registered now and removed at the end of the block.
        selector: which sites, as in `hl.select`. None selects every module.
        ports: one or several of "output", "input", "grad_output", "grad_input" and "grad" (of
            parameters), for selectors that name no port. An input is the tensor if the module got
            one tensor alone, else a dict of the arguments by name; `**x` is a keyword
            argument if a positional one is named `x`, too. A gradient has the structure of its
            value.
        to: a new folder, or a URL of fsspec (`s3://bucket/acts`), for a store that grows pass by
            pass: a row for each item of each pass. None keeps all passes in memory.
        every_thread: True records in every thread and async task. False records in the calling
            thread or task, and in code that runs in a copy of its context.
        keep: a function of the value; its result is kept, as in `lambda t: t[:, -1]`. It is called
            with the whole value. At a gradient port, it is called with each tensor of the gradient
            when that tensor arrives. It runs without autocast. In it, sums, means, norms and powers
            of 16-bit floats are computed in float32, and stay float32. None, the default, keeps
            the value itself.
        device: the device on which tensors are kept. None, the default, leaves them where they are.
        dtype: the dtype in which floating tensors are kept. Other tensors keep theirs. None, the
            default, converts nothing.
        detach: True, the default, detaches tensors from the autograd graph. False keeps the graph,
            and with it the memory of the whole pass. Tensors with a graph are then copied only with
            `copy=True`; the model does not use this copy, so the loss has no gradient for it.
        copy: True copies every tensor, False none. None copies where torch cannot report changes.
            The default is None, and True with `to=`.

    Returns:
        A line. `with ... as run` gives its `Recording`. Without `with`, read `line.recording` and
        end the line with `line.remove()`. With `to=`, the line has the store in `line.store` after
        the block.

    Raises:
        SelectionError: the selector is malformed or matches nothing, or a port is unknown.
        AttachError: the model cannot be hooked, or an option is invalid. Or `to=` is given with
            tensors by name or with `every_thread=True`, or with the port "grad" without `keep`: a
            gradient of a parameter has no row for each item.
        TypeError: there is no such option.
        FolderError: `to` holds files, or cannot be written.
        SiteError: (when the model runs) a value lacks the selected leaf, or with `copy=True` a
            tensor is in an object that cannot be copied.
        StructureError: (when the model runs) `keep` takes one tensor, and the value holds several;
            or it writes to the value.
            With `to=`, a value has no row for each item, or rows of another shape than before.
    """
    check_option_names(record, options, KeepOptions.__annotations__)
    names = ports_for(model, ports)
    refuse_ignored_ports(ports, selector)
    if to is not None:
        options = {"copy": True, **options}
    keeping = check_keep_options(options)
    line = Line(model, name="record", every_thread=every_thread, lenient=selector is None)
    recorder = start_recording(line, selector, names, keeping)
    return recorder if to is None else make_store_line(line, recorder.recording, to, options)


def start_recording(
    line: Line,
    selector: Selector,
    ports: tuple[str, ...],
    options: KeepOptions,
    after: Callable[[Site], None] | None = None,
) -> RecordLine:
    """Attach a line that records.

    Args:
        line: a new line.
        selector: which sites.
        ports: the ports for selectors that name none.
        options: the options of `record`, as `check_keep_options` returns them.
        after: called with each site after its value has been kept; refuses gradient sites.
    """
    selection = line.select(selector, ports)
    back = None if after is None else next((s for s in selection if s.is_gradient), None)
    if back is not None:
        raise SelectionError(
            f"hl.{line.name} must be given sites of the forward, got {back}.\nUse hl.record(model,"
            f" {str(back)!r}), and call backward() inside the block."
        )
    recorder = _Recorder(line, selection, options, after)
    line.attach_taps(selection, recorder.bind, Order.RECORD)
    return RecordLine(line, recorder.recording)


@final
class _Recorder:
    """Make the recording of a line, and the tap or callback for each of its sites.

    Args:
        line: the line, which fills the recording.
        selection: the sites.
        options: the options of `record`.
        after: called with each site after its value has been kept.

    Attributes:
        recording: the recording that is filled.
    """

    def __init__(
        self,
        line: Line,
        selection: Selection,
        options: KeepOptions,
        after: Callable[[Site], None] | None,
    ) -> None:
        sites, places, nodes = selection.sites, selection.places, line.module_tree.nodes
        unversioned = (
            UnversionedMemory(line.root, len(nodes)) if options.get("copy") is None else None
        )
        self._unversioned = unversioned
        self._computing = frozenset(filter(returns_new_memory, line.module_tree.kinds))
        self._passes = line.passes
        self._after = after
        self._places = enumerate(places)  # `bind` is called once for each site, in this order
        self._fast = _FAST_TAPS if after is None and keeps_plain_values(options) else {}
        self._takes_blocks = isinstance(options.get("keep"), ByQuery)
        self._kept = Keeper(options, unversioned)
        self._in_graph = compiled_keep_function(options)
        self._of_graph = Keeper({**options, "keep": None, "copy": False}, None)
        self._keeps_graph = not options.get("detach", True)
        self.recording = line.passes.sink = Recording(
            sites,
            _weak_report_function(line, sites),
            {node.path: type(node.module).__name__ for node in nodes},
            keeps_graph=self._keeps_graph,
            unversioned=unversioned,
        )
        if line.root is not None:
            self.recording.set_model(weakref.ref(line.root))
            settings = SettingsReader(nodes, self.recording.modules)
            looks = may_generate(line.root)
            line.passes.at_root = _RootObserver(line.name, settings, may_search=looks)

    def bind(self, site: Site) -> Bound:
        """Return the tap or callback for the next site."""
        number, (_, node) = next(self._places)
        make = self._fast.get(site.port)
        if make is not None and not site.leaf and site.call is None:
            return make(self, site, number, node)
        if site.is_gradient:
            return self._gradient_keeper(number, node)
        callback = _keeping_callback(number, self._kept, site)
        bound: Callback | SplitCallback = callback
        if self._after is not None:
            bound = _followed_by(callback, self._after, site)
        elif self._in_graph is not None:
            bound = SplitCallback(
                callback, self._in_graph, _keeping_callback(number, self._of_graph, site)
            )
        return BlockwiseCallback(bound) if self._takes_blocks else bound

    def _gradient_keeper(self, number: int, node: Any) -> GradientKeeper:
        parameter = getattr(node, "tensor", None)
        return GradientKeeper(number, self._kept, parameter, keeps_graph=self._keeps_graph)

    def _plain_output_tap(self, site: Site, number: int, node: Any) -> Tap:
        tap = _PlainTap(site, self._passes, do_nothing, Order.RECORD)
        tap.number, tap.kept = number, self._kept
        module = node.module
        if type(module) in self._computing and "forward" not in module.__dict__:
            tap.unversioned, tap.may_hand_on = None, False
        else:
            tap.unversioned, tap.may_hand_on = self._unversioned, _may_return_input(module)
        return tap

    def _plain_gradient_tap(self, site: Site, number: int, node: Any) -> Tap:
        return PlainGradTap(site, self._passes, self._gradient_keeper(number, node), number)


@final
class _RootObserver:
    """Note the settings of torch at each pass, and warn once of beams or drafted tokens.

    Args:
        name: the name of the verb.
        settings: reads the settings.
        may_search: whether the model may search; until the warning.
    """

    def __init__(self, name: str, settings: SettingsReader, *, may_search: bool) -> None:
        self._name = name
        self._settings = settings
        self._may_search = may_search

    def __call__(self, current: Pass, frame: FrameType) -> None:
        current.settings = self._settings.read()
        told = _search_text(frame) if self._may_search else None
        if told:
            current.at_end.append(partial(self._warn_of_search, current, told))

    def _warn_of_search(self, current: Pass, told: str) -> None:
        # The values may be from before the search, such as the encoder's.
        if not self._may_search or not current.log:
            return
        self._may_search = False
        warn(
            f"hl.{self._name} sees generate() {told}, or record one run of the model on the"
            " sequences that it returns."
        )


def _search_text(frame: FrameType) -> str | None:
    """Say how a search of `generate` makes other values than a run of its result; None if not."""
    n = n_beams(frame)
    if n > 1:
        return (
            f"search with {n} beams: values have {n} rows for each input, one for each beam, and"
            " the search may reorder them between passes.\nGive num_beams=1 to generate()"
        )
    if is_assisted(frame):
        return (
            "check drafted tokens: a pass has values of several tokens, and of some that are"
            " dropped again.\nGenerate without an assistant"
        )
    return None


# The ports with a tap of their own for whole values that are kept as they are.
_FAST_TAPS: dict[str, Callable[[_Recorder, Site, int, Any], Tap]] = {
    "output": _Recorder._plain_output_tap,
    "grad_output": _Recorder._plain_gradient_tap,
}


def _weak_report_function(line: Line, sites: tuple[Site, ...]) -> Callable[[], Report]:
    """Return a function that gives a line's report, and that holds the line weakly.

    The line's hooks hold the recording. A dropped line must be free to end.
    """
    name, model_type = line.name, line.module_tree.name
    method = weakref.WeakMethod(line.report)

    def report() -> Report:
        report_of_line = method()
        if report_of_line is not None:
            return report_of_line()
        why = dict.fromkeys(sites, "its line was dropped, and nobody could end it")
        return Report(name, model_type, 0, 0, True, sites, (0,) * len(sites), why)

    return report


@final
class _PlainTap(OutputTap):
    """Keep a whole output, detached: `OutputTap.fire` and `_keeping_callback` in one, for speed.

    One call less saves a fiftieth of what torch takes for a module with a hook. All modules share
    this one function, because Python runs a call faster that always meets the same function.
    """

    __slots__ = ("kept", "may_hand_on", "number", "unversioned")

    # Set by the recorder: a line has many of these taps, and an `__init__` of its own takes time.
    number: int  # the number of the site
    kept: Keeper  # keeps the values that the fast way cannot
    # Tells whether an output may change without a new version. None where it cannot, as for a
    # module that returns new memory.
    unversioned: UnversionedMemory | None
    may_hand_on: bool  # whether the module may return the value that was kept just before

    def fire_slowly(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep a nested value, or a value outside of a pass, as other taps do."""
        # Made here because most taps never need it. An inert copy has no callback.
        if getattr(self, "callback", None) is do_nothing:
            self.callback = _keeping_callback(self.number, self.kept, self.site)
        OutputTap.fire(self, module, args, output)

    def collect(self, current: Pass, run: CompiledRun) -> None:
        """Keep the detached copies that compiled code has made."""
        traced = self.traced
        if traced is not None and traced.captured is not None:
            captured, traced.captured = traced.captured, None
            if not run.is_again:
                self.fired += len(captured)
                for value in captured:
                    current.log_entry((self.number, value, None))

    def fire(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the output: the forward hook."""
        if is_dynamo_compiling():
            self.fire_in_graph(output)
            return
        current = self.in_thread.current
        if current is None or type(output) is not Tensor:
            self.fire_slowly(module, args, output)
            return
        try:
            version = output._version
            # A tensor that was just kept, as by an identity, has been checked already.
            if self.unversioned is not None and (
                not self.may_hand_on or not (log := current.log) or log[-1][1] is not output
            ):
                unversioned_lines = current.unversioned
                if unversioned_lines is None:
                    unversioned_lines = self.unversioned.cache_lines(current)
                # storage_offset comes first: data_ptr takes twice as long.
                if (
                    output.storage_offset()
                    or output.data_ptr() >> CACHE_LINE_BITS in unversioned_lines
                ):
                    self.fire_slowly(module, args, output)
                    return
        except RuntimeError:  # it has no version counter, or no memory of its own
            self.fire_slowly(module, args, output)
            return
        self.fired += 1
        if output.requires_grad:
            output = output.detach()
        current.log_entry((self.number, output, version))


def _may_return_input(module: nn.Module) -> bool:
    """Tell whether a module often returns the tensor that another module has just returned.

    Containers do, and layers such as `nn.Identity`. A layer of a user's own class mostly computes.
    """
    is_of_torch = type(module).__module__.startswith("torch.")
    return is_of_torch or not is_uncompiled_leaf(module)


def _keeping_callback(number: int, keeper: Keeper, site: Site) -> Callback:
    def callback(current: Pass, value: Any) -> None:
        if current.region is None:
            result, was = keeper(current, value, site)
        else:
            with outside_checkpoint(current.region):
                result, was = keeper(current, value, site)
        current.log_entry((number, result, was))

    return callback


def _followed_by(callback: Callback, after: Callable[[Site], None], site: Site) -> Callback:
    def see_then(current: Pass, value: Any) -> None:
        callback(current, value)
        after(site)

    return see_then
