"""Read the highest classes from the output of a classifier of images."""

from __future__ import annotations

import math
from typing import Any

from hookline.errors import HooklineError
from hookline.recordings.feature_maps import class_scores_in
from hookline.views.page.image_overlays import Images
from hookline.views.page.value_entries import ValueEntry

_MOST_CLASSES = 5
_SUM_ERROR = 0.01  # of shares in half precision
_DIGITS = 4


def top_class_scores_of_entry(
    entry: ValueEntry, images: Images, sample: int
) -> dict[str, Any] | None:
    """Return the highest classes, if a value is the output of a classifier of the images."""
    site = entry.site
    if site.path != "" or site.port != "output" or site.leaf:
        return None
    try:
        scores = top_class_scores(entry.recorded.read(), sample)
    except (HooklineError, RuntimeError, TypeError):
        return None
    return scores if scores is not None and scores["samples"] == images.n_images else None


def top_class_scores(output: Any, sample: int) -> dict[str, Any] | None:
    """Return the highest class scores of one sample, and their shares; None if it has none.

    The shares are the scores themselves if they are positive and sum to 1, and else their softmax.
    A score of minus infinity is taken for a class that is masked; it is not listed.

    >>> scores = top_class_scores(torch.tensor([[0.0, 9.0, 0.0]]), 0)
    >>> scores["classes"], scores["top"][0]
    (3, [1, 9.0, 0.9998])
    """
    scores = class_scores_in(output)
    if scores is None or scores.shape[1] < 2 or not 0 <= sample < len(scores):
        return None
    row = scores[sample].detach().cpu().double()
    n_classes = len(row)
    data: dict[str, Any] = {"classes": n_classes, "samples": len(scores), "sample": sample}
    n_finite = int(row.isfinite().sum())
    if not n_finite or not bool((row < math.inf).all()):  # NaN is not below anything
        return data | {"top": [], "is_share": False}
    is_share = bool((row >= 0).all()) and abs(float(row.sum()) - 1) < _SUM_ERROR
    shares = row if is_share else row.softmax(0)
    numbers, classes = row.topk(min(_MOST_CLASSES, n_finite))
    top = [
        [index, *(float(f"{number:.{_DIGITS}g}") for number in (score, float(shares[index])))]
        for index, score in zip(classes.tolist(), numbers.tolist(), strict=True)
    ]
    return data | {"top": top, "is_share": is_share}
