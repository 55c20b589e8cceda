"""The commands. Each one parses its arguments, calls a verb or `inspect`, and prints the result."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import RenderableType

import hookline as hl
from hookline.cli.compare_command import compare_from_options, github_annotations
from hookline.cli.environment import Environment
from hookline.cli.extract_command import extract_from_options, join_torchrun_group, move_to_device
from hookline.cli.inspect_doctor_profile import (
    Inspection,
    batch_to_inputs,
    diagnose,
    inspect,
    inspection_data,
    profile_steps,
    read_input,
    silent_sites_text,
)
from hookline.cli.store_commands import store_app
from hookline.cli.terminal import (
    AsJson,
    FailOnOption,
    ProgressBar,
    exit_on_errors,
    exit_on_findings,
    out,
    print_json,
    print_result,
    print_result_or_json,
    print_to_stderr,
    print_warnings,
)
from hookline.cli.view_command import (
    local_folder,
    make_server,
    open_in_browser,
    parse_items_option,
    serve_until_interrupt,
    write_folder_page,
)
from hookline.display.text import plural
from hookline.display.wrapped_text import terminal_width
from hookline.errors import InputError, ModelError
from hookline.models import Batch, LoadedModel, load_model
from hookline.models.demo import load_training_facts
from hookline.models.packages import RANDOM
from hookline.verbs.check.replay_file import read_saved_call
from hookline.verbs.shared.run_model import Inputs
from hookline.views import terminal_plots
from hookline.views.page import write_comparison_page

app: typer.Typer = typer.Typer(
    name="hookline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

app.add_typer(store_app)

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision:NAME, timm:NAME, hf:NAME-or-folder, file.py:factory,"
        " package.module:factory, or demo:digits",
    ),
]
InputName = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="an image or a folder of them, a file of arrays (.npy, .npz, .pt, .safetensors) or of"
        " texts (.txt, .jsonl, .parquet), text, or random:1x3x224x224",
    ),
]
Weights = Annotated[
    str, typer.Option(help="default (the library's own), none (random), or a checkpoint file")
]
_COMPARED = (
    "what run.save, hl.extract or hl.monitor wrote, or a file of arrays (.npz, .npy, .safetensors,"
    " .pt)"
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"hookline {hl.__version__}, torch {torch.__version__}", markup=False)
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version, and end"
        ),
    ] = False,
) -> None:
    """See, measure and change what flows through any PyTorch model."""


@app.command()
def demo(out_folder: Annotated[Path, typer.Option("--out", help="the folder to write")] = Path(
    "hookline-demo"
)) -> None:  # fmt: skip
    """Inspect a small network that is shipped with hookline. No download."""
    with exit_on_errors():
        loaded, batch = _load_with_input("demo:digits", "demo", "default")
        inspection = inspect(loaded, batch, None, out_folder)
        facts = load_training_facts()
    print_result(inspection.summary)
    out.print(
        f"\nA small convolutional network, trained on scikit-learn's digits"
        f" ({facts['accuracy']:.1%} right on {facts['n_test']} held-out ones), ran on eight digits."
    )
    _print_written_paths(inspection)
    command = _hookline_command()
    out.print(
        "\nTry next:\n"
        f"  {command} summary demo:digits demo\n"
        f'  {command} inspect demo:digits demo --at "block*:input"\n'
        f"  {command} inspect torchvision:resnet34 PHOTO.jpg    (needs the extra vision)",
        markup=False,
    )


@app.command("env")
def env_command(as_json: AsJson = False) -> None:
    """Print versions, devices and extras, as a report of a fault needs them."""
    print_result_or_json(Environment(), as_json)


@app.command("inspect")
def inspect_command(
    model: ModelName,
    source: InputName,
    at: Annotated[
        list[str] | None,
        typer.Option("--at", metavar="SELECTOR", help="the sites to record; may be repeated"),
    ] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="the folder to write")] = Path(
        "hookline-run"
    ),
    weights: Weights = "default",
    plot: Annotated[
        bool, typer.Option("--plot", help="also draw histograms and small maps in the terminal")
    ] = False,
    open_it: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
    level: FailOnOption = None,
    as_json: AsJson = False,
) -> None:
    """Run a model on an input: print a table and the findings, write a recording and a page."""
    with exit_on_errors(as_json):
        if as_json and plot:
            raise InputError(
                "--plot must be left out with --json, got both.\nLeave out one of the two."
            )
        loaded, batch = _load_with_input(model, source, weights)
        inspection = inspect(loaded, batch, at, out_folder)
    drawing, not_drawn = _draw_plots_or_reason(inspection) if plot else (None, "")
    if as_json:
        print_json(inspection_data(inspection, batch))
    else:
        _print_inspection(inspection, batch, drawing)
    if open_it and inspection.page is not None:
        open_in_browser(inspection.page.resolve().as_uri())
    if inspection.summary.failure:
        before = (
            "The values before the failure were recorded."
            if len(inspection.recording)
            else "No selected site ran before the failure, so nothing was written."
        )
        print_to_stderr(f"the forward failed in {inspection.summary.failure}\n{before}")
        raise typer.Exit(1)
    silent = silent_sites_text(inspection.recording.report(), are_chosen=bool(at))
    if silent:
        print_to_stderr(silent)
    if not_drawn:
        print_to_stderr(not_drawn)
    if not_drawn or not len(inspection.recording):
        raise typer.Exit(1)
    exit_on_findings(inspection.findings, level)


def _print_inspection(inspection: Inspection, batch: Batch, drawing: RenderableType | None) -> None:
    print_result(inspection.summary, with_failure=False)
    out.print(f"\n{batch.description}", markup=False)
    n_rows = len(batch.images)
    if inspection.classes and n_rows > 1:
        out.print(f"the first of {n_rows}:")
    for label, probability in inspection.classes:
        out.print(f"  {probability:6.1%}  {label}", markup=False)
    if drawing is not None:
        out.print()
        out.print(drawing, width=out.width if out.is_terminal else terminal_width())
    if len(inspection.recording):
        out.print()
        print_result(inspection.findings)
    _print_written_paths(inspection)


@app.command("extract")
def extract_command(
    model: ModelName,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="a folder of images or of a Hugging Face data set, a file of arrays (.npy, .npz,"
            " .pt, .safetensors) or of texts (.txt, .jsonl, .parquet); for demo:digits: demo",
        ),
    ],
    at: Annotated[
        list[str], typer.Option("--at", metavar="SELECTOR", help="the sites; may be repeated")
    ],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="the folder or URL of the store")],
    batch_size: Annotated[int, typer.Option(help="items of a batch")] = 32,
    dtype: Annotated[
        str | None, typer.Option(help="of floating values as stored: float32, float16, bfloat16")
    ] = None,
    workers: Annotated[int, typer.Option(help="processes that load the data")] = 0,
    skip_errors: Annotated[
        bool, typer.Option("--skip-errors", help="leave out items that cannot be loaded")
    ] = False,
    weights: Weights = "default",
    device: Annotated[
        str | None, typer.Option(help="where the model runs; default: cuda if there is one")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="ray: on a Ray cluster; default: here, or under torchrun")
    ] = None,
) -> None:
    """Run a model over a data set, and store the values at some sites; keeps complete shards."""
    options = {
        "batch_size": batch_size, "dtype": dtype, "workers": workers,
        "on_error": "skip" if skip_errors else "raise", "engine": engine,
    }  # fmt: skip
    with exit_on_errors(), print_warnings(), join_torchrun_group() as is_heard:
        with ProgressBar(f"loading {model}"):
            loaded = move_to_device(load_model(model, weights=weights), device)
        store = extract_from_options(loaded, data, at, to, options)
        if is_heard:
            print_result(store)
            out.print(f"\nRead it in Python: hl.open({to!r})", markup=False, soft_wrap=True)


@app.command()
def summary(
    model: ModelName,
    source: Annotated[
        str | None, typer.Argument(metavar="INPUT", help="as for inspect; none: parameters only")
    ] = None,
    weights: Weights = "default",
    meta: Annotated[
        bool, typer.Option("--meta", help="shapes only: no weights and no memory, for any model")
    ] = False,
    depth: Annotated[
        int | None, typer.Option(min=0, help="print no modules below this depth")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a model's modules: path, type, shapes, parameters, FLOPs, memory."""
    with exit_on_errors(as_json):
        if meta and weights not in ("default", "none"):
            raise InputError(
                "--weights must be left out with --meta, which loads none, got both.\nLeave out"
                " one of the two."
            )
        context = torch.device("meta") if meta else contextlib.nullcontext()
        with context, ProgressBar(f"loading {model}"), _suggest_meta_on_missing_weights():
            loaded = load_model(model, weights="none" if meta else weights)
        inputs = _read_inputs(source, loaded)
        with ProgressBar("running the model"):
            table = hl.summary(loaded.model, inputs)
        if depth is not None:
            table = table.fold(depth)
    print_result_or_json(table, as_json, with_failure=False)
    if table.failure:
        print_to_stderr(f"the forward failed in {table.failure}")
        raise typer.Exit(1)


@app.command()
def anatomy(
    model: ModelName,
    source: Annotated[
        str | None, typer.Argument(metavar="INPUT", help="as for inspect; none: random texts")
    ] = None,
    weights: Weights = "default",
    as_json: AsJson = False,
) -> None:
    """Name the parts of a transformer, each proven on two inputs."""
    with exit_on_errors(as_json):
        loaded = _load_model(model, weights)
        inputs = _read_inputs(source, loaded)
        with ProgressBar("running the model"):
            parts = hl.anatomy(loaded.model, inputs)
    print_result_or_json(parts, as_json)


@app.command()
def operations(
    model: ModelName,
    source: InputName,
    path: Annotated[str, typer.Argument(metavar="PATH", help="the module; '' is the model")] = "",
    weights: Weights = "default",
    as_json: AsJson = False,
) -> None:
    """List the functions of torch that a module itself calls, and the site of each call."""
    with exit_on_errors(as_json):
        loaded, batch = _load_with_input(model, source, weights)
        with ProgressBar("running the model"):
            table = hl.operations(loaded.model, batch_to_inputs(loaded.model, batch), path)
    print_result_or_json(table, as_json, batch)


@app.command()
def profile(
    model: ModelName,
    source: InputName,
    backward: Annotated[
        bool, typer.Option("--backward", help="also run backward, from the mean of the squares")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="the number of passes; the first is not in the medians")
    ] = 6,
    depth: Annotated[
        int | None, typer.Option(min=0, help="print no modules below this depth")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a Chrome trace, for Perfetto")
    ] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="write a page, report.html")
    ] = None,
    weights: Weights = "default",
    as_json: AsJson = False,
) -> None:
    """Measure time, FLOPs and memory of each module, forward and backward."""
    with exit_on_errors(as_json):
        loaded, batch = _load_with_input(model, source, weights)
        with ProgressBar("running the model", steps) as busy:
            profiling = profile_steps(loaded.model, batch, steps, backward=backward, progress=busy)
        table = profiling.per_pass if depth is None else profiling.per_pass.fold(depth)
    print_result_or_json(table, as_json, batch)
    with exit_on_errors():
        files = [profiling.trace(trace)] if trace is not None else []
        if out_path is not None:
            files.append(hl.write_page(profiling, out_path, title=loaded.name))
    for file in files:
        if not as_json:
            out.print(f"\nwritten: {file}", markup=False, soft_wrap=True)
    if profiling.failure:
        print_to_stderr(f"the run failed {profiling.failure}")
        raise typer.Exit(1)


@app.command()
def view(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="what run.save, hl.extract, hl.monitor or hl.check(keep=) wrote"
        ),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="DIR2", help="a second folder to compare with")
    ] = None,
    port: Annotated[int, typer.Option(help="the port; if it is taken, the next free one")] = 8765,
    host: Annotated[
        str, typer.Option(help="the address to bind to; other machines need the printed token")
    ] = "127.0.0.1",
    wait: Annotated[
        bool, typer.Option("--wait", help="wait for a folder that is not written yet")
    ] = False,
    items: Annotated[
        str | None,
        typer.Option(
            help="of a store: the items to draw, as 5,17 or 1000:1008; of several ranks: the rank"
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="do not open a browser")] = False,
    out_path: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="write report.html there instead of serving"),
    ] = None,
) -> None:
    """Show a recording, a store, a run or a finding in the browser, or two recordings."""
    with exit_on_errors():
        folders = [local_folder(name) for name in (folder, other) if name is not None]
        chosen = parse_items_option(items, folders)
        if out_path is not None:
            if wait:
                raise InputError(
                    "--wait waits for a folder while it serves, got --out, which writes at once."
                    "\nLeave out one of them."
                )
            written, findings = write_folder_page(folders, chosen, out_path)
            out.print(f"written: {written}", markup=False, soft_wrap=True)
            if findings is not None:
                out.print()
                print_result(findings)
            return
        server = make_server(folders, chosen, host, port, wait)
        serve_until_interrupt(server, folders, not no_open)


@app.command("findings")
def findings_command(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="what run.save, hl.extract or hl.monitor wrote")
    ],
    level: FailOnOption = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong in a recording, a store or a training, worst first, and where it begins."""
    with exit_on_errors(), ProgressBar("reading the values"):
        findings = hl.open(folder).findings()
    print_result_or_json(findings, as_json)
    exit_on_findings(findings, level)


@app.command("compare")
def compare_command(
    a: Annotated[str, typer.Argument(metavar="A", help=_COMPARED)],
    b: Annotated[str, typer.Argument(metavar="B", help="the reference, of the same kind")],
    names: Annotated[
        list[str] | None,
        typer.Option(metavar="THEIRS=OURS", help="rename a path of B to one of A; may be repeated"),
    ] = None,
    floor: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="the run A in float64: how far it is off A is noise"),
    ] = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="the inputs that tell the tokens, if they were not recorded (.npz, .safetensors,"
            " .pt): one file for both, or the option twice; none: compare values as they are",
        ),
    ] = None,
    dims: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SITES=]DIM",
            help="how to join the plain tensors of several ranks: a dimension, sum, mean, max or"
            " min; may be repeated",
        ),
    ] = None,
    annotations: Annotated[
        bool, typer.Option("--annotations", help="print a line for each site, for CI to show")
    ] = False,
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="PATH", help="also write the comparison as a page, report.html"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where two runs part; the exit code is 1 if they differ beyond noise."""
    with exit_on_errors(), ProgressBar("comparing"):
        comparison = compare_from_options(a, b, names or [], floor, tokens or [], dims or [])
    if as_json:
        print_json(comparison.to_dict())
    elif annotations:
        for line in github_annotations(comparison):
            typer.echo(line)
    else:
        print_result(comparison)
    if out_path is not None:  # after the result, which a full disk must not take away
        with exit_on_errors():
            page = write_comparison_page(comparison, out_path, (a, b))
        if not (as_json or annotations):
            out.print(f"\nwritten: {page}", markup=False, soft_wrap=True)
    if not comparison.ok:
        raise typer.Exit(1)


@app.command()
def invariance(
    model: ModelName,
    source: InputName,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help='a check to make, as "padded left"; may be repeated'),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="of the compiled run; inductor checks its kernels, too")
    ] = "aot_eager",
    weights: Weights = "default",
    as_json: AsJson = False,
) -> None:
    """Run a batch in many ways that should not change its results; the exit code is 1 if one does.

    The ways: alone, padded, in chunks, compiled, and others.
    """
    with exit_on_errors(as_json):
        loaded, batch = _load_with_input(model, source, weights)
        with ProgressBar("running the model"):
            result = hl.invariance(
                loaded.model, batch_to_inputs(loaded.model, batch), only=only, backend=backend
            )
    print_result_or_json(result, as_json, batch)
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def hooks(model: ModelName, weights: Weights = "none", as_json: AsJson = False) -> None:
    """List every hook on a model as its library builds it, and who registered it."""
    with exit_on_errors(as_json):
        inventory = hl.inventory(_load_model(model, weights).model)
    print_result_or_json(inventory, as_json)


@app.command("doctor")
def doctor_command(
    model: ModelName,
    source: Annotated[
        str | None, typer.Argument(metavar="INPUT", help="as for inspect; none: a guess")
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option("--at", metavar="SELECTOR", help="the sites to check; may be repeated"),
    ] = None,
    ports: Annotated[
        str, typer.Option(help="output, input, grad_output, grad_input, grad; separate by commas")
    ] = "output",
    weights: Weights = "none",
    as_json: AsJson = False,
) -> None:
    """Say which of the selected sites would fire, and why the others would not."""
    with exit_on_errors(as_json):
        diagnosis, description = diagnose(_load_model(model, weights), at, source, ports)
    if as_json:
        print_json({**diagnosis.to_dict(), "input": description})
    else:
        print_result(diagnosis)
        out.print(f"\ninput: {description}", markup=False)
    if not diagnosis.ok:
        raise typer.Exit(1)


@app.command("replay")
def replay_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="a file that hl.check(keep=) wrote")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="as for inspect: run its module again")
    ] = None,
    weights: Weights = "none",
) -> None:
    """Show who made a NaN or an infinity; with the model, run that module alone once more."""
    with exit_on_errors():
        saved = read_saved_call(file)
        finding = None
        if model is not None:
            finding = saved.run(_load_model(model, weights).model, hl.check)
    out.print(str(saved.finding), markup=False, soft_wrap=True)
    if finding is not None:
        out.print("\nrun again:", markup=False)
        out.print(str(finding), markup=False, soft_wrap=True)
    elif model is not None:
        print_to_stderr(
            "the module ran again, and all was finite: is it the model that the file is of?"
        )
        raise typer.Exit(1)


@contextlib.contextmanager
def _suggest_meta_on_missing_weights() -> Iterator[None]:
    """Add --meta to the error about missing weights: a table of shapes needs none."""
    try:
        yield
    except ModelError as error:
        problem, _, remedy = str(error).partition("\n")
        if RANDOM not in remedy:
            raise
        raise ModelError(f"{problem}\nUse --meta: a summary needs no weights.\n{remedy}") from error


def _load_model(name: str, weights: str) -> LoadedModel:
    with ProgressBar(f"loading {name}"):
        return load_model(name, weights=weights)


def _read_inputs(source: str | None, loaded: LoadedModel) -> Inputs | None:
    if source is None:
        return None
    return batch_to_inputs(loaded.model, read_input(source, loaded))


def _load_with_input(model: str, source: str, weights: str) -> tuple[LoadedModel, Batch]:
    loaded = _load_model(model, weights)
    if weights == "none":
        loaded = replace(loaded, labels=None)  # the scores of random weights name no class
    with ProgressBar(f"loading {source}"):
        return loaded, read_input(source, loaded)


def _draw_plots_or_reason(inspection: Inspection) -> tuple[RenderableType | None, str]:
    """Draw the plots of a recording; return None and the reason if nothing could be drawn."""
    if not len(inspection.recording):
        return None, ""  # the caller reports an empty recording itself
    try:
        return terminal_plots(inspection.recording), ""
    except InputError as error:
        return None, str(error)


def _hookline_command() -> str:
    """Return the command as the user can type it: by name if the shell finds it."""
    return "hookline" if shutil.which("hookline") else sys.argv[0]


def _print_written_paths(inspection: Inspection) -> None:
    if inspection.page is None:
        return
    n = len(inspection.recording)
    out.print(
        f"\n{plural(n, 'value')} in {inspection.folder}/ (hl.open reads them); look at:",
        markup=False,
    )
    out.print(f"  {inspection.page}", markup=False, soft_wrap=True)
