"""Measure one number for each of many changes, with as few forwards as possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from hookline.engine import Selector, Site, is_compiled, path_text, require_model
from hookline.engine.pytree import tree
from hookline.errors import InputError, positive_integer
from hookline.recordings import Recording
from hookline.verbs.record.prefix import Prefix
from hookline.verbs.shared.progress_bar import progress_bar
from hookline.verbs.shared.rerun import copied, lazy_name, untouched
from hookline.verbs.shared.run_model import Inputs, call
from hookline.verbs.sweep.effects import Sweep
from hookline.verbs.sweep.forwards import Forwards, recorded_run
from hookline.verbs.sweep.grid import Changes, Each, Grid, check_each, entries_of, sites_of
from hookline.verbs.sweep.metric import Metric, check_callable, number_of, refuse_constant


def sweep(
    model: nn.Module,
    inputs: Inputs,
    changes: Changes | Selector,
    metric: Metric,
    *,
    each: Each | None = None,
    clean: Inputs | None = None,
    read: str | Site | None = None,
    rows: int = 16,
    to: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sweep:
    """Measure a metric of a model under each of many changes.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
        >>> changes = {"0": hl.edits.scale(0), "1": hl.edits.scale(0)}
        >>> sweep = hl.sweep(model, torch.ones(1, 2), changes, lambda out: out[0, 0])
        >>> sweep.axes, sweep.values.shape
        (('site',), (2,))

    The numbers are those of a loop with `hl.edit`, and the model runs less often. Changes at one
    site share a forward, as rows of a batch. Modules that ended before the changed site are not run
    again, and return what they returned in the unchanged run. Two changes are also measured by
    `hl.edit`; if these disagree, each change has a whole forward, and `sweep.notes` says so.

    With `clean`, values of another run are put back, one site after the other. `each` names
    dimensions of the values along which they are put back part by part:

        >>> x, clean = torch.zeros(1, 2), torch.ones(1, 2)
        >>> sweep = hl.sweep(model, x, ["0", "1"], lambda out: out[0, 0], clean=clean,
        ...                  each={"unit": 1})
        >>> sweep.axes, sweep.values.shape
        (('site', 'unit'), (2, 3))

    Args:
        model: the model, in eval mode. It is left as it was, also after an exception.
        inputs: what the model runs on, as in `hl.features`. The first dimension of each tensor is
            the batch.
        changes: one of these. A change is a function of the value, as in `hl.edit`.

            - `{site: change}`: one change at each site that a selector matches
            - `{site: {label: change}}` or `{site: [change, ...]}`: several at each site
            - a list of `{site: change}`, or of `(label, {site: change})`: each entry is made as a
              whole, in one forward
            - with `clean`, a selector: the values of the clean run, put in at each of its sites
        metric: a function of the model's output that returns one number. With inputs of several
            rows, it gets the output of all these rows.
        each: for each further axis, the dimension of the value that it runs along:
            `{"position": 1}` makes a change for each index of dimension 1, and leaves the other
            indices as they were. `{"head": (2, 12)}` cuts dimension 2 into 12 equal parts.
        clean: the inputs of the clean run, whose metric is then known.
        read: the site whose value the metric gets in place of the model's output. Each forward
            stops there.
        rows: the most changes that share a forward.
        to: a folder for the numbers, which are written after each site. A sweep that was
            interrupted goes on when it is called again.
        progress: False shows no progress bar. By default, a terminal shows one.

    Returns:
        An array with named axes. `sweep.values` has the metrics, `sweep[site, ...]` looks up an
        effect by labels, and `sweep.unmoved` marks changes that put in the value that was there.
        Rows of a batch may differ from single runs by rounding; with `rows=1` all bits are those of
        the loop.

    Raises:
        SelectionError: a selector matches nothing.
        NotRecordedError: the model does not reach one of the sites.
        InputError: the model is in training mode; the metric gives no number, or the same for other
            outputs; the values of the clean run have other shapes; or an argument is invalid.
        StructureError: a change returns a value of another shape or dtype.
        FolderError: `to` holds another sweep, or cannot be written.
    """
    check_callable(metric)
    positive_integer("rows", rows, "Give rows=16.")
    each = check_each(each)
    with _undisturbed(model):
        with _reader(model, read) as run:
            clean_metric = None
            if clean is not None:
                sites = [] if _are_changes(changes) else changes
                output, recording = recorded_run(model, run, copied(clean), sites)
                changes = changes if _are_changes(changes) else _patches(recording)
                clean_metric = number_of(metric, output)
            entries = entries_of(model, changes)
            forwards = Forwards(model, run, inputs, metric, sites_of(entries))
            refuse_constant(metric, forwards.output, forwards.baseline)
            grid = Grid(entries, each, forwards.known)
            forwards.settle(grid.groups, rows)
            with progress_bar(shown=progress) as bar:
                task = bar.add_task("sweep", total=grid.n_points, rows="")
                for group in grid.groups:
                    forwards.measure(group, group.points)
                    bar.update(task, completed=len(forwards.results))
    return _result(grid, forwards, clean_metric)


def _result(grid: Grid, forwards: Forwards, clean: float | None) -> Sweep:
    is_change = np.zeros(grid.shape, dtype=bool)
    is_change[tuple(np.transpose(list(forwards.results)))] = True
    result = Sweep(grid.axes, forwards.baseline, clean, is_change)
    for index, (number, has_moved) in forwards.results.items():
        result.values[index] = number
        result.unmoved[index] = not has_moved
    result.forwards, result.notes = forwards.count, forwards.notes
    return result


# -- the model -----------------------------------------------------------------------------------


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the block without gradients and compiled code, and leave the model as it was.

    Raises:
        InputError: the model is in training mode, or its first run would create parameters.
    """
    check_model("sweep", model)
    with ExitStack() as stack:
        if any(map(is_compiled, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(untouched(model))
        stack.enter_context(torch.no_grad())
        yield


def check_model(verb: str, model: nn.Module) -> None:
    """Refuse a model whose numbers would change from run to run.

    Raises:
        InputError: the model is in training mode, or its first run would create parameters.
    """
    require_model(model, verb)
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        raise InputError(
            f"the model must be in eval mode, got {path_text(training)} in training mode, where"
            " dropout and batch norm change the numbers.\nCall model.eval() first."
        )
    name = lazy_name(model)
    if name is not None:
        raise InputError(
            f"the model must have no lazy parameters, got {name}: the first run would create it."
            "\nRun the model once yourself, then call this again."
        )


@contextmanager
def _reader(model: nn.Module, read: str | Site | None) -> Iterator[Callable[[Any], Any]]:
    """Yield a function that runs the model and returns what the metric reads."""
    if read is None:
        yield partial(call, model)
        return
    with Prefix(model, str(read), "sweep", {}) as prefix:
        if len(prefix.sites) != 1:
            raise InputError(
                f"read must be one site, got {read!r}, which matches {len(prefix.sites)}."
                f"\nGive one of them: {str(prefix.sites[0])!r}."
            )

        def run(inputs: Any) -> Any:
            missing = prefix.run(inputs)
            for site in missing:
                prefix.recording[site]  # raises an error that says why
            return prefix.recording.take()[-1][prefix.sites[0]]

        yield run


# -- the values ----------------------------------------------------------------------------------


def _are_changes(changes: Any) -> bool:
    """Tell whether changes are given, and not a selector."""
    if isinstance(changes, list | tuple):
        return any(isinstance(item, Mapping | tuple) for item in changes)
    return isinstance(changes, Mapping)


def _patches(recording: Recording) -> dict[str, Callable[[Any], Any]]:
    """Return changes that put back the values of a clean run.

    Raises:
        AmbiguousError: a module ran several times.
    """
    return {str(site): _Put(recording[site]) for site in recording.sites}


@final
class _Put:
    """Put in a value of another run.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, value: Any) -> Any:
        # A copy, because a later in-place layer may write to it.
        return tree.map_tensors(Tensor.clone, self._value)
