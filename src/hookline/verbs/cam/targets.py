"""The target of a class map: the score of a class, or a function of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine.pytree import describe
from hookline.errors import InputError
from hookline.recordings.feature_maps import class_scores_in

ClassTarget = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None

_WRITE = (
    "\nGive a function of its output that returns one number for each image: target=lambda out: ..."
)


class Goal(NamedTuple):
    """The score whose gradient is taken: of one class an image, or of a function of the output."""

    classes: Tensor | None  # the class of each image, int64, shape `(batch,)`; None with a function
    # A function from the model's output to one number an image, or to one number; None with
    # classes.
    function: Callable[[Any], Tensor] | None

    def scores(self, output: Any, n_rows: int, image: int | None = None) -> Tensor:
        """Return the score of each row of an output, shape `(n_rows,)`; () if the function sums.

        Args:
            image: the image whose class to use, if all rows are versions of one image.

        Raises:
            InputError: the function returned something else.
        """
        if self.classes is not None:
            rows = self.classes if image is None else self.classes[image].expand(n_rows)
            return logits(output).gather(1, rows[:, None])[:, 0]
        assert self.function is not None
        scores = self.function(output)
        is_number = isinstance(scores, Tensor) and scores.is_floating_point()
        if not is_number or tuple(scores.shape) not in ((), (n_rows,)):
            raise InputError(
                f"target= must return a score for each image, got {describe.in_words(scores)} for"
                f" the model's output, {describe.in_words(output)}.\nReturn one floating number for"
                " each image, shape"
                f" ({n_rows},), or a single one, shape ()."
            )
        return scores


def resolve_target(target: ClassTarget, output: Any, n_images: int) -> Goal:
    """Resolve a target into classes or a function, with the model's output.

    Raises:
        InputError: a number is not a class of the model, there is not one class for each image, or
            the model's output has no classes.
    """
    if callable(target) and not isinstance(target, Tensor):
        return Goal(None, target)
    class_scores = logits(output)
    if len(class_scores) != n_images:
        raise InputError(
            f"the model must return one row of scores for each of {plural(n_images, 'image')}, got"
            f" {plural(len(class_scores), 'row')}.{_WRITE}"
        )
    if target is None:
        return Goal(class_scores.argmax(1), None)
    classes = _class_numbers(target, n_images)
    if len(classes) != n_images:
        raise InputError(
            f"target= must name one class for each of {plural(n_images, 'image')}, got"
            f" {plural(len(classes), 'class', 'classes')}."
            "\nGive one class for each image, or a single number for all."
        )
    n_classes = class_scores.shape[1]
    for class_number in classes:
        if not 0 <= class_number < n_classes:
            raise InputError(
                f"target must be one of the model's {n_classes} classes, 0 to {n_classes - 1}, got"
                f" {class_number}.\nGive one of these, or None for each image's highest class."
            )
    return Goal(torch.tensor(classes, device=class_scores.device), None)


def _class_numbers(target: Any, n_images: int) -> list[int]:
    """Return the named classes; a single number counts for all images.

    Raises:
        InputError: the target holds something other than integers.
    """
    whole = target.tolist() if hasattr(target, "tolist") else target  # a tensor, an array
    is_one = not isinstance(whole, Sequence) or isinstance(whole, str)
    parts = [whole] * n_images if is_one else list(whole)
    if any(isinstance(part, bool) or not isinstance(part, int) for part in parts):
        raise InputError(
            f"target must be the number of a class, got {target!r}.\nGive a class's number, one"
            " number for each image, a function of the model's output, or None for each image's"
            " highest class."
        )
    return parts


def logits(output: Any) -> Tensor:
    """Return the class scores in a model's output, shape `(batch, classes)`.

    Raises:
        InputError: the output holds no class scores.
    """
    scores = class_scores_in(output)
    if scores is None:
        raise InputError(
            f"the model must return class scores of shape (batch, classes), got"
            f" {describe.in_words(output)}.{_WRITE}"
        )
    return scores
