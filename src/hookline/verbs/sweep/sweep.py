"""Measure one number for each of many changes, with as few forwards as possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
from torch import nn

from hookline.display.text import first_line
from hookline.engine import Selection, Selector, Site, module_tree
from hookline.errors import InputError, NotRecordedError, check_option_names, check_positive_int
from hookline.verbs.record.partial_forward import PartialForward
from hookline.verbs.shared.progress_bar import progress_bar
from hookline.verbs.shared.run_model import Inputs, call_model, copy_inputs
from hookline.verbs.sweep.change_hooks import ChangeHooks
from hookline.verbs.sweep.forwards import Forwards
from hookline.verbs.sweep.grid import (
    Changes,
    Each,
    Grid,
    check_each,
    clean_patches,
    entry_sites,
    parse_changes,
)
from hookline.verbs.sweep.metric import (
    Metric,
    metric_number,
    refuse_constant_metric,
    require_metric_function,
)
from hookline.verbs.sweep.repeatable_runs import require_clean_inputs, without_side_effects
from hookline.verbs.sweep.sweep_folder import SweepFolder, fingerprint_sweep
from hookline.verbs.sweep.sweep_results import Sweep


class SweepOptions(TypedDict, total=False):
    """Options of `hl.sweep`.

    Args:
        rows: the most changes at one site that share a forward; 16 by default.
        to: a folder for the numbers, from which an interrupted sweep goes on.
        progress: False shows no progress bar; it is only shown in a terminal.
    """

    rows: int
    to: str | os.PathLike[str] | None
    progress: bool


def sweep(
    model: nn.Module,
    inputs: Inputs,
    changes: Changes | Selector,
    metric: Metric,
    *,
    each: Each | None = None,
    clean: Inputs | None = None,
    read: str | Site | Selection | None = None,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Measure a metric of a model under each of many changes.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
        >>> changes = {"0": hl.edits.scale(0), "1": hl.edits.scale(0)}
        >>> sweep = hl.sweep(model, torch.ones(1, 2), changes, lambda out: out[0, 0])
        >>> sweep.axes, sweep.values.shape
        (('site',), (2,))

    The numbers are those of a loop with `hl.edit`, and the model runs less often. Changes share a
    forward, as rows of a batch. Modules that ended before the changed site are not run
    again, and return what they returned in the unchanged run. A few changes are also measured
    alone, in whole forwards; if these disagree, each change has a whole forward, and `sweep.notes`
    says so.

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
        rows: the most changes at one site that share a forward; 16 by default. With `rows=1`, each
            change has its own forward.
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
            outputs; or an argument is invalid.
        StructureError: a change returns a value of another shape or dtype, or the values of the
            clean run have other shapes.
        FolderError: `to` holds another sweep, or cannot be written.
        TypeError: there is no such option.
    """
    require_metric_function(metric)
    if clean is not None:
        require_clean_inputs(clean)
    check_option_names(sweep, options, SweepOptions.__annotations__)
    rows, to = options.get("rows", 16), options.get("to")
    check_positive_int("rows", rows, "Give rows=16.")
    each = check_each(each)
    with (
        without_side_effects(model, "hl.sweep(model, ...)", inputs, clean),
        _model_runner(model, read) as run,
    ):
        modules = module_tree(model)
        values: dict[str, list[Any]] = {}  # of the clean run
        puts_back = clean is not None and not _are_changes(changes)
        entries = (
            clean_patches(modules, changes, values)
            if puts_back
            else parse_changes(modules, changes)
        )
        changing = ChangeHooks(modules, entry_sites(entries), inputs)
        with changing.attached(entry_sites(entries, outside=True)):
            clean_metric = None
            if puts_back:
                output, noted = changing.record_values(lambda: run(copy_inputs(clean)))
                values.update(noted)
                clean_metric = metric_number(metric, output)
            elif clean is not None:
                clean_metric = metric_number(metric, run(copy_inputs(clean)))
            forwards = Forwards(changing, run, inputs, metric)
            refuse_constant_metric(metric, forwards.output, forwards.baseline)
            grid = Grid(entries, each, changing.known)
            folder = None
            if to is not None:
                job = fingerprint_sweep(model, inputs, clean, metric, entries)
                numbers = {"baseline": forwards.baseline, "clean": clean_metric, "axes": grid.axes}
                # Changes that share a forward have other last bits.
                parts = {"read": str(read), "each": each, "rows": "one" if rows == 1 else "several"}
                folder = SweepFolder(to, {**job, **parts, **numbers})
                forwards.resume_from(grid.groups, folder.results, str(to))
            forwards.choose_sharing(grid.groups, rows)
            _measure_all(forwards, grid, folder, shown=options.get("progress", True))
    return _make_result(grid, forwards, clean_metric)


def _measure_all(
    forwards: Forwards, grid: Grid, folder: SweepFolder | None, *, shown: bool
) -> None:
    """Measure all changes that have no number yet, with a progress bar."""
    if len(forwards.results) == grid.n_points and folder is None:
        return  # a few share the forward that was checked
    with progress_bar(shown=shown) as bar:
        task = bar.add_task("sweep", total=grid.n_points, rows="")
        for groups in forwards.joinable_groups(grid.groups):
            forwards.measure(groups)
            if folder is not None:
                folder.write(forwards.results)
            bar.update(task, completed=len(forwards.results))


def _make_result(grid: Grid, forwards: Forwards, clean: float | None) -> Sweep:
    values = np.full(grid.shape, np.nan)
    is_change, unmoved = np.zeros((2, *grid.shape), dtype=bool)
    for index, (number, has_moved) in forwards.results.items():
        values[index], is_change[index], unmoved[index] = number, True, not has_moved
    count = forwards.count + (clean is not None)
    with np.errstate(invalid="ignore"):  # infinity less infinity is NaN
        effects = values - forwards.baseline
    arrays = effects, is_change, values, unmoved
    return Sweep(grid.axes, forwards.baseline, clean, *arrays, count, forwards.notes)


@contextmanager
def _model_runner(
    model: nn.Module, read: str | Site | Selection | None
) -> Iterator[Callable[[Any], Any]]:
    """Yield a function that runs the model and returns what the metric reads."""
    if read is None:
        yield partial(call_model, model)
        return
    with PartialForward(model, read, "sweep", {}) as runner:
        if len(runner.sites) != 1:
            raise InputError(
                f"read must be one site, got a selector that matches {len(runner.sites)}."
                f"\nGive one of them: {str(runner.sites[0])!r}."
            )

        def run(inputs: Any) -> Any:
            missing = runner.run(inputs)
            if missing:
                runner.recording[missing[0]]  # raises an error that says why
            return runner.recording.pop_passes()[-1][runner.sites[0]]

        try:
            yield run
        except NotRecordedError as error:
            raise InputError(
                "read must be a site that comes after the changed ones, got"
                f" {str(runner.sites[0])!r}: {first_line(error)}."
                "\nRead a later site, or the model's output: read=None."
            ) from error


def _are_changes(changes: Any) -> bool:
    """Tell whether changes are given, and not a selector."""
    if isinstance(changes, list | tuple):
        return any(isinstance(item, Mapping | tuple) for item in changes)
    return isinstance(changes, Mapping)
