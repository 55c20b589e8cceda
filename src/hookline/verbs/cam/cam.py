"""Map the places of an image that raise the score of a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Never, final

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from hookline.display.text import listed, plural
from hookline.engine import Selector, Site, is_compiled, is_scripted, require_model, unwrap
from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import (
    AmbiguousError,
    AttachError,
    InputError,
    SelectionError,
    check_option_names,
    check_positive_int,
    warn,
)
from hookline.recordings import Recording
from hookline.recordings.feature_maps import channel_counts
from hookline.verbs.cam.class_maps import ClassMaps
from hookline.verbs.cam.methods import Method, method_named, min_max_scaled
from hookline.verbs.cam.spatial_layers import (
    MapLayer,
    Reshape,
    find_map_layer,
    last_spatial_layer,
    recorded_gradient,
    recording_line,
    select_outputs,
)
from hookline.verbs.cam.targets import ClassTarget, Goal, resolve_target
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.refused_weights import explain_inference_weights, refuse_meta_tensors
from hookline.verbs.shared.run_model import call_model, unwrap_lone_tensor

# Scores of two runs that repeat themselves may differ by this part of the greatest one: kernels of
# GPUs add up in any order, in half precision too.
_REPEATED = 1e-2


def cam(
    model: nn.Module,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    layer: Selector = None,
    target: ClassTarget = None,
    *,
    method: str = "gradcam",
    reshape: Reshape | None = None,
    batch_size: int = 32,
    **others: Never,
) -> ClassMaps:
    """Map the places of each image that raise a class's score, on a scale from 0 to 1.

        >>> images, labels = load_demo_digits()
        >>> maps = hl.cam(load_model("demo:digits").model, images)
        >>> maps.layers, maps.targets, maps.maps.shape
        (('block3',), (0, 1, 2, 3, 4, 5, 6, 7), torch.Size([8, 8, 8]))

    The model runs in eval mode. In training mode, dropout would make the maps random, and batch
    norm would mix the images of a batch. Afterwards its mode, buffers, gradients and hooks, and
    torch's random state, are as before. Gradients need not be enabled, and parameters need not be
    trainable.

    In each layer's map, negative values become 0. The map is then scaled from 0 (its least value)
    to 1 (its largest), and enlarged to the image. The maps of several layers are averaged and
    scaled again. So a 0 need not mean that the place has no effect, and maps of two images are not
    on one scale. `raw` of the result holds the numbers before all this.

    Args:
        model: a classifier of images, convolutional or a vision transformer.
        inputs: the images as the model takes them: floating, shape `(batch, channels, height,
            width)`. Or the model's arguments as a tuple, or by name in a dict; the first such
            tensor is the images. Give a dict that is one argument as `({...},)`. A list of one
            tensor is this tensor, unless the model takes the list.
        layer: the layers whose outputs make the maps, as in `hl.select`; several are averaged. None
            is the last layer that returns maps; `layers` of the result names it. A vision
            transformer may compute the score from its class token alone, and a model of several
            outputs without its auxiliary head. Then None is the last layer at which the maps, or
            the tokens of the patches, get a gradient from the score.
        target: the number of a class; a number for each image; None for each image's highest
            class; or a function of the model's output that returns one number an image, or one
            number.
        method: "gradcam", "gradcam++", "layercam" or "hirescam"; "eigencam", which needs no
            gradient and no class; or "scorecam", which needs no gradient. "scorecam" runs the model
            once for each channel of the layer and each image. With 512 channels it takes some 60 to
            100 times as long as "gradcam".
        reshape: a function from a layer's output to its maps, shape `(batch, channels, height,
            width)`. hookline itself finds maps with channels last, and tokens of square patches
            after a class token and registers.
        batch_size: the number of masked images that scorecam runs at once.
        **others: none are allowed. For a name of another package (`target_layers`), the error says
            what to write here.

    Returns:
        The maps, shape `(batch, height, width)` of the images, float32 from 0 to 1, with their
        layers, classes and scores. `overlay()` lays them over the images, and `save(path)` writes
        the overlays.

    Raises:
        InputError: the inputs hold no images; the method or class is unknown; the target's function
            does not return a score for each image; the score has no gradient; or a score or map is
            not finite.
        SelectionError: the selector matches nothing, or a layer that returns no maps.
        NotRecordedError: the layer did not run.
        AmbiguousError: the layer ran several times; name a call (`"relu#1"`).
        AttachError: `model` is not a model, or is scripted.
        TypeError: another argument is given.

    Source: Grad-CAM (Selvaraju et al., 2017), Grad-CAM++ (Chattopadhay et al., 2018), LayerCAM
    (Jiang et al., 2021), HiResCAM (Draelos and Carin, 2020), Eigen-CAM (Muhammad and Yeasin, 2020)
    and Score-CAM (Wang et al., 2020). The scaling and the averaging are those of the package
    grad-cam (pytorch-grad-cam).
    """
    check_option_names(cam, others)
    way = method_named(method)
    require_model(model, "hl.cam(model, images)")
    if any(is_scripted(module) for module in model.modules()):
        raise AttachError(
            f"the model must be plain Python, got {type(model).__name__}, which is scripted or"
            " traced in whole or in part: torch calls no hooks there."
            "\nGive the model before scripting."
        )
    refuse_meta_tensors("hl.cam", model, inputs)
    if reshape is not None and not callable(reshape):
        raise InputError(
            f"reshape= must be a function, got {reshape!r}.\nGive a function from a layer's output"
            " to maps of shape (batch, channels, height, width)."
        )
    # The module inside a compiled model runs eagerly; to compile it anew for a map costs more.
    model = unwrap(model) if is_compiled(model) else model
    with (
        torch.inference_mode(mode=False),
        eval_without_side_effects(model),
        torch.set_grad_enabled(way.needs == "gradients"),
        explain_inference_weights("hl.cam", model),
    ):
        inputs = unwrap_lone_tensor(model, inputs)
        return _CamRunner(model, inputs, target, way, reshape).maps(layer, batch_size)


class _ForwardResult(NamedTuple):
    """The results of one run: by layer the activations, and the weights of the formula."""

    activations: list[Tensor]
    weights: list[Tensor]
    goal: Goal | None
    scores: Tensor | None


@final
class _CamRunner:
    """Run a model on its inputs, and compute the maps of any of its layers."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        target: ClassTarget,
        method: Method,
        reshape: Reshape | None,
    ) -> None:
        self._model = model
        self._images = _images_in(inputs)
        self._inputs = inputs
        self._target = target
        self._method = method
        self._reshape = reshape
        self._n = len(self._images)
        self._size: tuple[int, int] = (self._images.shape[2], self._images.shape[3])

    def maps(self, layer: Selector, batch_size: int) -> ClassMaps:
        """Compute the class maps of the selected layers, or of the last layer that has maps."""
        sites = [self._find_last_layer()] if layer is None else select_outputs(self._model, layer)
        forward = self._run_and_read_layers(sites)
        if self._method.needs == "scores":
            weights = self._masked_scores_by_layer(forward, batch_size)
            self._warn_if_not_repeatable(forward)
            forward = forward._replace(weights=weights)
        raw = {
            str(site): self._method.formula(activations, weights).detach()
            for site, activations, weights in zip(
                sites, forward.activations, forward.weights, strict=True
            )
        }
        for name, maps in raw.items():
            _check_maps(name, maps, self._method.name)
        whole = [
            self._resize_to_image(min_max_scaled(maps.relu())[:, None])[:, 0].to(
                self._images.device
            )
            for maps in raw.values()
        ]
        classes = None if forward.goal is None else forward.goal.classes
        return ClassMaps(
            maps=min_max_scaled(torch.stack(whole).mean(0)).float(),
            layers=tuple(raw),
            method=self._method.name,
            targets=(None,) * self._n if classes is None else tuple(classes.tolist()),
            scores=forward.scores,
            raw=raw,
            images=self._images.detach().clone(),
        )

    # -- running ---------------------------------------------------------------------------------

    def _run_model_on(self, images: Tensor, rows: slice | None = None) -> Any:
        """Run the model on other images, and on these rows of the other tensors of the batch.

        It gets copies, because it may write to its inputs, and cannot to a leaf.
        """

        def replaced(tensor: Tensor) -> Tensor:
            if tensor is self._images:
                return images.clone()
            if rows is None or tensor.dim() == 0 or len(tensor) != self._n:
                return tensor.clone()
            return tensor[rows].repeat(len(images), *[1] * (tensor.dim() - 1))

        return call_model(self._model, tree.map_tensors(replaced, self._inputs))

    def _find_last_layer(self) -> Site:
        images = self._images_with_grad()

        def flow_back(output: Any) -> None:
            self._backward_from_scores(self._resolve_goal(output), output, images)

        return last_spatial_layer(
            self._model,
            lambda: self._run_model_on(images),
            flow_back if self._method.needs == "gradients" else None,
            self._n,
            self._size,
        )

    def _run_and_read_layers(self, sites: list[Site]) -> _ForwardResult:
        if self._method.needs != "gradients":
            with recording_line(self._model, sites, ("output",)) as run:
                output = self._run_model_on(self._images)
            goal = self._resolve_goal(output)
            scores = None if goal is None else self._finite_scores(goal, output)
            _, activations = self._layers_and_activations(run, sites)
            return _ForwardResult(activations, activations, goal, scores)
        with recording_line(self._model, sites, ("output", "grad_output")) as run:
            leaf = self._images_with_grad()
            output = self._run_model_on(leaf)
            layers, activations = self._layers_and_activations(run, sites)
            goal = self._resolve_goal(output)
            scores = self._backward_from_scores(goal, output, leaf)
        gradients = []
        for layer in layers:
            flowed = recorded_gradient(run, layer.site)
            if flowed is None or leaves.get(flowed, layer.leaf, str(layer.site)) is None:
                raise InputError(
                    f"the score must depend on {layer.site}, got no gradient there: the score does"
                    " not use it, or a detach() or no_grad() in the model cuts the graph."
                    "\nName another layer, or method='eigencam' or 'scorecam', which need none."
                )
            gradients.append(layer.maps(flowed))
        return _ForwardResult(activations, gradients, goal, scores)

    def _images_with_grad(self) -> Tensor:
        return self._images.detach().clone().requires_grad_()

    def _backward_from_scores(self, goal: Goal | None, output: Any, leaf: Tensor) -> Tensor:
        assert goal is not None
        scores = self._finite_scores(goal, output)
        if not scores.requires_grad:
            raise InputError(
                "the score must have a gradient, got none: the model, or target=, runs under"
                " no_grad() or detaches it."
                "\nUse method='eigencam' or 'scorecam', which need no gradient."
            )
        # autograd.grad with respect to the images touches no parameter's .grad. If the stem ends
        # in detach(), no gradient reaches the images, so backward runs to the parameters above it.
        total = scores.sum()
        above = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        try:
            (arrived,) = torch.autograd.grad(total, leaf, allow_unused=True, retain_graph=True)
            if arrived is None and above:
                torch.autograd.grad(total, above, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                error.add_note(
                    "hookline: torch computes no gradients of inputs through a reentrant checkpoint"
                    " of the model. Give checkpoint(..., use_reentrant=False); for a transformers"
                    " model, call gradient_checkpointing_disable(); or use method='eigencam' or"
                    " 'scorecam', which need none."
                )
            raise
        return scores.detach()

    # -- reading ---------------------------------------------------------------------------------

    def _resolve_goal(self, output: Any) -> Goal | None:
        try:
            return resolve_target(self._target, output, self._n)
        except InputError:
            if self._method.needs == "nothing" and self._target is None:
                return None  # the method needs no class, so the model may have none
            raise

    def _finite_scores(self, goal: Goal, output: Any) -> Tensor:
        scores = goal.scores(output, self._n)
        if not bool(scores.isfinite().all()):
            raise InputError(
                "the score must be finite, got a model output that holds inf or NaN."
                "\nFind where they begin: with hl.record(model, copy=True) as run: model(x), then"
                " go through run.passes[0].order; or run the model in float32."
            )
        return scores

    def _layers_and_activations(
        self, run: Recording, sites: list[Site]
    ) -> tuple[list[MapLayer], list[Tensor]]:
        layers, activations = [], []
        channels = channel_counts(self._model)
        for site in sites:
            calls = run.calls(site)
            if len(calls) > 1:
                raise AmbiguousError(
                    f"layer= must name one call of {site}, which ran {len(calls)} times."
                    f"\nGive layer={f'{site}#{len(calls) - 1}'!r} for the last."
                )
            value = calls[0]
            layer = find_map_layer(site, value, self._n, self._size, self._reshape, channels)
            if layer is None:
                raise SelectionError(
                    f"{site} ({site.module_type}) must return maps of {plural(self._n, 'image')} of"
                    f" {self._size[0]} x {self._size[1]}, got {describe.in_words(value)}."
                    "\nName a layer that returns (batch, channels, height, width), or give"
                    " reshape=, a function from its output to that; without layer= the last one is"
                    " found."
                )
            layers.append(layer)
            activations.append(layer.maps(value).detach())
        return layers, activations

    # -- masks -----------------------------------------------------------------------------------

    def _masked_scores_by_layer(self, forward: _ForwardResult, batch_size: int) -> list[Tensor]:
        check_positive_int("batch_size", batch_size, "Give batch_size=64.")
        assert forward.goal is not None
        scores = []
        for activations in forward.activations:
            rows = [
                self._masked_scores(forward.goal, image, activations[image], batch_size)
                for image in range(self._n)
            ]
            scores.append(torch.stack(rows).to(activations))
        return scores

    def _warn_if_not_repeatable(self, forward: _ForwardResult) -> None:
        """Warn if the same images get other scores in a second run: then masks say nothing."""
        assert forward.goal is not None
        assert forward.scores is not None
        again = forward.goal.scores(self._run_model_on(self._images), self._n)
        apart = (again - forward.scores).abs().max().item()
        if apart > _REPEATED * forward.scores.abs().max().item():
            warn(
                "hl.cam compares the scores of many runs, and the run did not repeat itself: the"
                f" same images got scores that differ by {apart:.3g}.\nLet each run begin alike,"
                " such as with one seed; or give method='gradcam', which needs one run."
            )

    def _masked_scores(self, goal: Goal, image: int, channels: Tensor, batch_size: int) -> Tensor:
        """Compute the score of one image masked by each channel, shape `(channels,)`."""
        scores = []
        for batch in torch.split(channels, batch_size):
            masks = min_max_scaled(self._resize_to_image(batch[:, None])[:, 0])[:, None].to(
                self._images
            )
            output = self._run_model_on(self._images[image] * masks, slice(image, image + 1))
            masked_scores = goal.scores(output, len(masks), image)
            if masked_scores.dim() == 0 and len(masks) > 1:
                raise InputError(
                    "target= must return the score of each masked image for scorecam, got one"
                    f" number for {len(masks)} images.\nReturn one for each image, or give"
                    " batch_size=1."
                )
            scores.append(masked_scores.reshape(-1))
        return torch.cat(scores)

    def _resize_to_image(self, maps: Tensor) -> Tensor:
        return interpolate(maps, self._size, mode="bilinear", align_corners=False)


def _images_in(inputs: Any) -> Tensor:
    """Return the first tensor in a model's inputs that holds images.

    Raises:
        InputError: no tensor holds images.
    """
    tensors = [tensor for _, tensor in tree.tensors(inputs)]
    for tensor in tensors:
        if tensor.dim() == 4 and tensor.is_floating_point() and tensor.numel():
            return tensor
    form = describe.in_full(tensors[0]) if isinstance(inputs, Tensor) else describe.in_words(inputs)
    remedy = "Give the images as the model takes them: prepared, stacked, on its device."
    if hasattr(inputs, "__array__") and not isinstance(inputs, Tensor):
        remedy = "Make the array a tensor: torch.from_numpy(images)."
    elif tensors and tensors[0].dim() == 3:
        remedy = "Make the single image a batch: x[None]."
    elif tensors and tensors[0].dim() == 4 and tensors[0].numel():
        remedy = "Prepare the images as in training: x.float() / 255, then as the model takes them."
    raise InputError(
        "inputs must hold images, a floating tensor of shape (batch, channels, height, width), got"
        f" {form}.\n{remedy}"
    )


def _check_maps(name: str, maps: Tensor, method: str) -> None:
    """Refuse maps that are not finite, and warn of images whose map is 0 everywhere.

    Raises:
        InputError: a map is not finite.
    """
    if not bool(maps.isfinite().all()):
        raise InputError(
            f"the map at {name} must be finite, got inf or NaN: its activations or gradients hold"
            " them, or overflow in half precision.\nRun the model in float32 or bfloat16."
        )
    empty = [image for image, map_HW in enumerate(maps) if not bool((map_HW > 0).any())]
    if empty:
        is_zero = not bool(maps[empty].any())
        why = (
            "the score does not depend on the layer, or the layer is dead. After a vision"
            " transformer's last attention the patches may not count, and half precision may round"
            " gradients to 0"
            if is_zero
            else "every place lowers the score"
        )
        images = listed(empty, 8)
        warn(
            f"{method} at {name} finds no place that raises the score of image {images}, so the map"
            f" is 0 everywhere: {why}.\nName another layer= or target=."
        )
