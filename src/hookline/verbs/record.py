"""record: keep the values at the selected sites. Imports engine and recordings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypedDict, final

import torch
from torch import Tensor, nn

from hookline.engine import (
    Line,
    OutputTap,
    Pass,
    Passes,
    Rank,
    Report,
    See,
    Selector,
    Site,
    check_ports,
    tree,
)
from hookline.engine.errors import AttachError
from hookline.recordings import Recording, stamp


class Keep(TypedDict, total=False):
    """What of a value is kept, and where. The options that `record` and `features` share.

    Args:
        keep: what to keep of each value, as in `lambda t: t[:, -1]`; called with the value itself.
        device: where to keep tensors.
        dtype: the dtype of floating tensors as kept; others stay as they are.
        detach: False keeps the autograd graph, and with it the memory of the whole pass.
        copy: copy every tensor, so that in-place operations later in the model cannot change it.
    """

    keep: Callable[[Any], Any] | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    detach: bool
    copy: bool


@final
class RecordLine:
    """A line that fills a recording: a context manager that gives it, or ended by `remove()`."""

    def __init__(self, line: Line, recording: Recording) -> None:
        self._line = line
        self.recording = recording

    def __enter__(self) -> Recording:
        self._line.__enter__()
        return self.recording

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._line.__exit__(kind, error, traceback)
        finally:
            self.recording.finish(self._line.report())

    def remove(self) -> None:
        """End the line: take its hooks off. The recording stays."""
        try:
            self._line.remove()
        finally:
            self.recording.finish(self._line.report())

    def report(self) -> Report:
        """What was matched and attached, how often each site fired, and why some never did."""
        return self._line.report()


def record(
    model: nn.Module,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] = "output",
    keep: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    detach: bool = True,
    copy: bool = False,
) -> RecordLine:
    """Record the values at the selected sites, while the block lasts.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with record(model, nn.Linear) as run:
        ...     _ = model(torch.zeros(4, 2))
        >>> run["0"].shape
        torch.Size([4, 3])

    The model computes what it would have computed, to the last bit. Values are kept as they are
    after edits. A value that an in-place operation changes later (`ReLU(inplace=True)`, `+=`) is
    never returned as if it were right: the look-up raises, and `copy=True` records it in time.
    Inference tensors, on which such a change cannot be noticed, are always copied.

    Args:
        model: the model. Hooks are attached now, and taken off at the end of the block.
        selector: which sites; as in `hl.select`. None is every module.
        ports: "output", "input" or both, for selectors that name no port. An input is the tensor,
            if that is all the module was called with, else a dict of its arguments by name.
        keep: what to keep of each value, as in `lambda t: t[:, -1]`; called with the value itself.
        device: where to keep tensors.
        dtype: the dtype of floating tensors as kept; others stay as they are.
        detach: False keeps the autograd graph, and with it the memory of the whole pass.
        copy: copy every tensor, so that in-place operations later in the model cannot change it.

    Returns:
        A line; `with ... as run` gives its `Recording`. Without `with`: `line.recording`, and
        `line.remove()` to end it.

    Raises:
        SelectionError: the selector matches nothing, or a port is unknown.
        AttachError: the model cannot be hooked, or a dtype or device is none.
        SiteError: (when the model runs) a selected leaf is not in the value.
    """
    return start_recording(
        model, selector, "record", check_ports(ports),
        keep=keep, device=device, dtype=dtype, detach=detach, copy=copy,
    )[0]  # fmt: skip


def _check_options(device: Any, dtype: Any) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise AttachError(f"dtype={dtype!r} is no dtype; give one such as torch.float16.")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise AttachError(f"device={device!r} is no device; give one such as 'cpu'.") from None


def start_recording(
    model: nn.Module,
    selector: Selector,
    name: str,
    ports: tuple[str, ...],
    after: Callable[[Site], None] | None = None,
    **options: Any,
) -> tuple[RecordLine, Line]:
    """Attach a recording line for a verb called `name`; also gives the bare line.

    `after`, if given, is called with a site when its value has been kept.
    """
    _check_options(options.get("device"), options.get("dtype"))
    line = Line(model, name=name)
    line.lenient = selector is None
    selection = line.select(selector, ports)
    modules = tuple([(node.path, type(node.module).__name__) for node in line.nodes])
    recording = Recording(selection.sites, line.report, modules)
    line.passes.sink = recording
    numbers = itertools.count()  # `bind` is called once for each site, in their order
    is_plain = options.get("detach", True) and not any(
        options.get(key) for key in ("keep", "device", "dtype", "copy")
    )

    def bind(site: Site) -> See | OutputTap:
        number = next(numbers)
        see = _keep_plain(number) if is_plain else _keep(number, **options)
        if after is not None:
            return _then(see, after, site)
        if is_plain and site.port == "output" and not site.leaf and site.call is None:
            return _PlainTap(site, line.passes, see, number)
        return see

    line.tap(selection, bind, Rank.RECORD)
    return RecordLine(line, recording), line


@final
class _PlainTap(OutputTap):
    """Keeps a whole output, detached: `OutputTap.fire` and `_keep_plain` in one, for speed.

    A call less is a fiftieth of what torch takes for a module with a hook.
    """

    __slots__ = ("number",)

    def __init__(self, site: Site, passes: Passes, see: See, number: int) -> None:
        super().__init__(site, passes, see, Rank.RECORD)
        self.number = number

    def fire(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook itself."""
        current = self.lane.current
        if current is None or not isinstance(output, Tensor):
            super().fire(module, args, output)
            return
        self.fired += 1
        if output.requires_grad:
            output = output.detach()
        try:
            current.note((self.number, output, output._version))
        except RuntimeError:  # an inference tensor has no version
            current.note((self.number, output.clone(), None))


def _keep_plain(number: int) -> See:
    """Keep a value as it is, detached."""

    def see(current: Pass, value: Any) -> None:
        kept = tree.map_tensors(_detached, value)
        current.note((number, kept, stamp(kept)))

    return see


def _then(see: See, after: Callable[[Site], None], site: Site) -> See:
    def see_then(current: Pass, value: Any) -> None:
        see(current, value)
        after(site)

    return see_then


def _keep(
    number: int,
    keep: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    detach: bool = True,
    copy: bool = False,
) -> See:
    def store(tensor: Tensor) -> Tensor:
        moved = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        # A slice would keep the memory of the whole it was cut from.
        is_part = keep is not None and _is_part(moved)
        if moved is tensor and (copy or is_part or moved.is_inference()):
            return moved.clone()
        return moved

    def see(current: Pass, value: Any) -> None:
        if detach:
            value = tree.map_tensors(Tensor.detach, value)
        if keep is not None:
            try:
                value = keep(value)
            except Exception as error:
                error.add_note(f"hookline: keep= was called with {tree.describe(value)}")
                raise
        kept = tree.map_tensors(store, value)
        current.note((number, kept, stamp(kept)))

    return see


def _detached(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone() if tensor.is_inference() else tensor


def _is_part(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
