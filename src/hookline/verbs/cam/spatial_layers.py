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
from hookline.recordings.feature_maps import ChannelCounts, Grid, Size, channel_counts, find_grid
from hookline.verbs.record.keep import check_keep_options
from hookline.verbs.record.record import RecordLine, start_recording

Reshape = Callable[[Tensor], Tensor]
RunModel = Callable[[], Any]
FlowBack = Callable[[Any], object]


class MapLayer(NamedTuple):
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


def recording_line(
    model: nn.Module,
    sites: list[Site],
    ports: tuple[str, ...],
    keep: Callable[[Any], Any] | None = None,
) -> RecordLine:
    """Return a line that records these sites at these ports, and that warns of nothing."""
    whole = module_tree(model)
    nodes = {node.path: node for node in whole.nodes}
    places = [(replace(site, port=port), nodes[site.path]) for site in sites for port in ports]
    options = check_keep_options({"copy": True, "keep": keep})
    line = Line(model, name="cam")
    recorder = start_recording(line, Selection(whole, places), ports, options)
    line.options.quiet = True
    return recorder


def find_map_layer(
    site: Site,
    value: Any,
    n_images: int,
    size: Size,
    reshape: Reshape | None,
    channels: ChannelCounts,
) -> MapLayer | None:
    """Find the way to read the maps in a layer's value; None if it holds no maps.

    Args:
        site: the layer's site.
        value: what it returned.
        n_images: the number of images.
        size: their height and width.
        reshape: turns a value into maps; None finds out how.
        channels: how many channels modules of the model return.

    Raises:
        InputError: `reshape` did not return maps.
    """
    for leaf, tensor in tree.tensors(value):
        if reshape is not None:
            _check_reshaped(site, tensor, reshape(tensor), n_images)
            return MapLayer(site, leaf, reshape)
        grid = find_grid(
            tensor, n_images, size, is_named=True, module_type=site.module_type, channels=channels
        )
        if grid is not None:
            return MapLayer(site, leaf, grid.to_maps)
    return None


def _check_reshaped(site: Site, value: Tensor, maps: Any, n_images: int) -> None:
    if not isinstance(maps, Tensor) or maps.dim() != 4 or maps.shape[0] != n_images:
        raise InputError(
            f"reshape= must return maps of {describe.in_words(value)} from {site}, got"
            f" {describe.in_words(maps)}."
            f"\nReturn a tensor of shape ({n_images}, channels, height, width)."
        )


def last_spatial_layer(
    model: nn.Module, run: RunModel, flow_back: FlowBack | None, n_images: int, size: Size
) -> Site:
    """Find the last layer, in the order of their calls, that returns maps.

    After the last attention of a vision transformer, the class token alone may count, and of a
    model with several outputs, the last layer may belong to another one than the score, such as an
    auxiliary head. Then no gradient reaches it, and the result is the last layer through whose
    patches the score flows. The projections of an attention (Linear layers) are left out, because
    they hold parts of tokens.

    Args:
        run: runs the model and returns its output.
        flow_back: runs backward from the score of an output; None for methods without gradients.

    Raises:
        SelectionError: no layer returns maps.
    """
    with recording_line(model, list(select(model)), ("output",), keep=_as_meta) as shapes:
        has_several = len(tree.distinct_tensors(run())) > 1
    candidates = _spatial_outputs(shapes, n_images, size, channel_counts(model))
    if not candidates:
        raise SelectionError(
            f"a layer of {type(model).__name__} must return maps of its {size[0]} x {size[1]}"
            " images, got none: (batch, channels, height, width), channels last, or tokens of"
            " square patches.\nName one with layer=, and with reshape= a function"
            " from its output to maps."
        )
    candidates = _without_queries(candidates) or candidates
    last, last_grid = candidates[-1]
    has_tokens = last_grid.form == "tokens"
    if flow_back is None or not (has_tokens or has_several):
        return last
    if has_tokens:
        candidates = [
            (site, grid) for site, grid in candidates
            if grid == last_grid and site.module_type != "Linear"
        ]  # fmt: skip
    sites = [site for site, _ in candidates]

    def reaches_patches(grad: Tensor) -> Tensor:
        return (grad[:, last_grid.n_prefix :] if has_tokens else grad).any()

    with recording_line(model, sites, ("grad_output",), keep=reaches_patches) as back:
        flow_back(run())
    # The gradient is None where none has arrived.
    return next((site for site in reversed(sites) if recorded_gradient(back, site)), last)


def _without_queries(candidates: list[tuple[Site, Grid]]) -> list[tuple[Site, Grid]]:
    """Leave out tokens that are no patches, such as the object queries of a detector.

    Patches of a model with convolutions are those of a convolution, merged by powers of two.
    """
    maps = {(grid.height, grid.width) for _, grid in candidates if grid.form != "tokens"}
    merged = {
        grid
        for height, width in maps
        for factor in (1, 2, 4, 8, 16, 32)
        for grid in (
            (height // factor, width // factor),
            (-(-height // factor), -(-width // factor)),
        )
    }
    return [
        (site, grid) for site, grid in candidates
        if not maps or grid.form != "tokens" or (grid.height, grid.width) in merged
    ]  # fmt: skip


def recorded_gradient(run: Recording, site: Site) -> Any:
    """Return the gradient of the output at a site; None if no gradient arrived."""
    try:
        return run[replace(site, port="grad_output")]
    except NotRecordedError:
        return None


def _as_meta(value: Any) -> Any:
    """Return an empty tensor on the meta device with a tensor's shape; None for other values."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return None


def _spatial_outputs(
    recording: Recording, n_images: int, size: Size, channels: ChannelCounts
) -> list[tuple[Site, Grid]]:
    """Return the calls of layers that returned maps."""
    outputs: list[tuple[Site, Grid]] = []
    for current in recording.passes:
        for site, call in current.fired():
            values = current.calls(site)
            # The model's own output is its answer, and not a layer's map.
            if not site.path or not isinstance(values[call], Tensor):
                continue
            grid = find_grid(
                values[call], n_images, size, is_named=False, module_type=site.module_type,
                channels=channels,
            )  # fmt: skip
            if grid is not None:
                call_site = replace(site, call=call) if len(values) > 1 else site
                outputs.append((call_site, grid))
    return outputs
