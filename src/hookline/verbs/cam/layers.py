"""Find the layers of a model that return maps, and read their values as maps.

A map's shape is `(batch, channels, height, width)`. A value may have this shape. It may also hold
channels last, as in Swin, or be the tokens of a vision transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.engine import Line, Selection, Selector, Site, module_tree, path_text, select
from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import InputError, NotRecordedError, SelectionError
from hookline.recordings import Recording
from hookline.verbs.record.keep import checked
from hookline.verbs.record.record import RecordLine, start_recording

MAX_PREFIX_TOKENS = 9  # a class token or two, and up to eight registers

Reshape = Callable[[Tensor], Tensor]
Size = tuple[int, int]
RunModel = Callable[[], Any]
FlowBack = Callable[[Any], object]


class Grid(NamedTuple):
    """A way to read a value as maps of a height and a width."""

    form: str  # "channels first", "channels last" or "tokens"
    height: int
    width: int
    n_prefix: int = 0  # the number of tokens before the tokens of the picture

    def read(self, value: Tensor) -> Tensor:
        """Return the value as maps, shape `(batch, channels, height, width)`."""
        if self.form == "channels first":
            return value
        if self.form == "tokens":
            shape = len(value), self.height, self.width, -1
            value = value[:, self.n_prefix :].reshape(shape)
        return value.permute(0, 3, 1, 2)


def grid_of(value: Tensor, n_images: int, size: Size, *, is_named: bool) -> Grid | None:
    """Find the way to read a value as maps of images of this size; None if it holds no maps.

    In a layer that a user has named, the maps may have another aspect ratio than the images.
    """
    shape = tuple(value.shape) if value.layout is torch.strided and not value.is_nested else ()
    if not shape or shape[0] != n_images or not value.is_floating_point():
        return None
    if len(shape) == 3:
        # A last dimension of 1 is pooled channels, and not tokens.
        return _tokens(shape[1], size) if shape[2] > 1 else None
    if len(shape) != 4:
        return None
    first, last = Grid("channels first", *shape[2:]), Grid("channels last", *shape[1:3])
    best = first if _misfit(first, size) <= _misfit(last, size) else last
    # Padding may add or remove a row or column on either side.
    fits = _misfit(best, size) <= 2 * sum(size)
    if not fits:
        best = first
    return best if best.height * best.width > 1 and (fits or is_named) else None


def _misfit(grid: Grid, size: Size) -> int:
    return abs(grid.height * size[1] - grid.width * size[0])


def _tokens(n_tokens: int, size: Size) -> Grid | None:
    """Find the grid of a picture's tokens: square patches that cover it, after prefix tokens."""
    height, width = size
    grids = {(height // side, width // side) for side in range(1, min(size) + 1)}
    grids |= {(-(-height // side), -(-width // side)) for side in range(1, min(size) + 1)}
    for n_prefix in range(min(MAX_PREFIX_TOKENS, n_tokens - 2) + 1):
        fitting = [grid for grid in grids if grid[0] * grid[1] == n_tokens - n_prefix]
        if fitting:
            best = min(fitting, key=lambda grid: abs(grid[0] * width - grid[1] * height))
            return Grid("tokens", *best, n_prefix)
    return None


class Layer(NamedTuple):
    """A layer of a class map: its site, and the place of the maps in its value."""

    site: Site
    leaf: tree.Leaf
    read: Reshape

    def maps(self, value: Any) -> Tensor:
        """Return the maps in a value or in its gradient, in at least float32."""
        maps = self.read(leaves.get(value, self.leaf, str(self.site)))
        return maps if maps.dtype is torch.float64 else maps.float()


def select_outputs(model: nn.Module, layer: Selector) -> list[Site]:
    """List the outputs that a selector matches.

    Raises:
        SelectionError: the selector matches nothing, or another port.
    """
    sites = list(select(model, layer, "output"))
    for site in sites:
        if site.port != "output":
            raise SelectionError(
                f"layer= must name outputs of layers, got {site}."
                f"\nName the layer alone: {path_text(site.path)!r}."
            )
    return sites


def recorder(
    model: nn.Module,
    sites: list[Site],
    ports: tuple[str, ...],
    keep: Callable[[Any], Any] | None = None,
) -> RecordLine:
    """Return a line that records these sites at these ports, and that warns of nothing."""
    whole = module_tree(model)
    nodes = {node.path: node for node in whole.nodes}
    places = [(replace(site, port=port), nodes[site.path]) for site in sites for port in ports]
    options = checked("cam", {"copy": True, "keep": keep})
    line = Line(model, name="cam")
    recorder = start_recording(line, Selection(whole, places), ports, options)
    line.options.quiet = True
    return recorder


def layer_at(
    site: Site, value: Any, n_images: int, size: Size, reshape: Reshape | None
) -> Layer | None:
    """Find the way to read the maps in a layer's value; None if it holds no maps.

    Raises:
        InputError: `reshape` did not return maps.
    """
    for leaf, tensor in tree.tensors(value):
        if reshape is not None:
            _check_reshaped(site, tensor, reshape(tensor), n_images)
            return Layer(site, leaf, reshape)
        grid = grid_of(tensor, n_images, size, is_named=True)
        if grid is not None:
            return Layer(site, leaf, grid.read)
    return None


def _check_reshaped(site: Site, value: Tensor, maps: Any, n_images: int) -> None:
    if not isinstance(maps, Tensor) or maps.dim() != 4 or maps.shape[0] != n_images:
        raise InputError(
            f"reshape= must return maps of {describe.in_words(value)} from {site}, got"
            f" {describe.in_words(maps)}."
            f"\nReturn a tensor of shape ({n_images}, channels, height, width)."
        )


class _SpatialOutput(NamedTuple):
    """A call of a layer that returned maps."""

    site: Site
    grid: Grid


def last_spatial(
    model: nn.Module, run: RunModel, flow_back: FlowBack | None, n_images: int, size: Size
) -> Site:
    """Find the last layer, in the order of their calls, that returns maps.

    After the last attention of a vision transformer, the class token alone may count. Then no
    gradient reaches the patches there, and the result is the last layer through whose patches the
    score flows. The projections of an attention (Linear layers) are left out, because they hold
    parts of tokens.

    Args:
        run: runs the model and returns its output.
        flow_back: runs backward from the score of an output; None for methods without gradients.

    Raises:
        SelectionError: no layer returns maps.
    """
    with recorder(model, list(select(model)), ("output",), keep=_shape_alone) as shapes:
        run()
    candidates = _spatial(shapes, n_images, size)
    if not candidates:
        raise SelectionError(
            f"a layer of {type(model).__name__} must return maps of its {size[0]} x {size[1]}"
            " images, got none: (batch, channels, height, width), channels last, or tokens of"
            " square patches.\nName one with layer=, and with reshape= a function"
            " from its output to maps."
        )
    last = candidates[-1]
    if last.grid.form != "tokens" or flow_back is None:
        return last.site
    tokens = [
        output.site
        for output in candidates
        if output.grid == last.grid and output.site.module_type != "Linear"
    ]
    n_prefix = last.grid.n_prefix
    with recorder(
        model, tokens, ("grad_output",), keep=lambda grad: grad[:, n_prefix:].any()
    ) as back:
        flow_back(run())
    reached = (site for site in reversed(tokens) if gradient(back, site) is not None)
    return next((site for site in reached if gradient(back, site)), last.site)


def gradient(run: Recording, site: Site) -> Any:
    """Return the gradient of the output at a site; None if no gradient arrived."""
    try:
        return run[replace(site, port="grad_output")]
    except NotRecordedError:
        return None


def _shape_alone(value: Any) -> Any:
    """Return an empty tensor on the meta device with a tensor's shape; None for other values."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return None


def _spatial(recording: Recording, n_images: int, size: Size) -> list[_SpatialOutput]:
    outputs: list[_SpatialOutput] = []
    for current in recording.passes:
        for site, call in current.fired():
            values = current.calls(site)
            # The model's own output is its answer, and not a layer's map.
            if not site.path or not isinstance(values[call], Tensor):
                continue
            grid = grid_of(values[call], n_images, size, is_named=False)
            if grid is not None:
                call_site = replace(site, call=call) if len(values) > 1 else site
                outputs.append(_SpatialOutput(call_site, grid))
    return outputs
