"""The commands of `hookline store`: look at a store, verify, repair, merge and export it."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from hookline.cli.terminal import (
    AsJson,
    ProgressBar,
    exit_on_errors,
    out,
    print_json,
    print_result,
    print_to_stderr,
)
from hookline.display.results import Printout
from hookline.display.text import plural
from hookline.display.units import size
from hookline.errors import InputError
from hookline.stores import Store, merge, open_store, repair, verify
from hookline.stores.exports import Format

store_app: typer.Typer = typer.Typer(
    name="store",
    help="Look at a store that hl.extract wrote; verify, repair, merge and export it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="the folder or URL of a store")]
_MOST_SAID = 20


@store_app.command()
def info(folder: Folder, as_json: AsJson = False) -> None:
    """Print the sites, shapes, statistics and the job of a store."""
    with exit_on_errors():
        store = open_store(folder)
        lines = _job_facts(store)
        data = store.to_dict() if as_json else {}
    if as_json:
        print_json(data)
        return
    print_result(store)
    out.print()
    print_result(Printout(totals=lines))


@store_app.command("verify")
def verify_command(folder: Folder) -> None:
    """Read all of a store and compare it with its checksums."""
    with exit_on_errors(), ProgressBar(f"verifying {folder}"):
        damages = verify(folder)
    for damage in damages[:_MOST_SAID]:
        out.print(str(damage), markup=False, soft_wrap=True)
    if damages:
        print_to_stderr(
            f"{plural(len(damages), 'file')} of {folder} damaged or gone."
            f"\nRun hookline store repair {folder}, then the same extraction again."
        )
        raise typer.Exit(1)
    out.print(f"{folder} is whole.", markup=False)


@store_app.command("repair")
def repair_command(folder: Folder) -> None:
    """Remove damaged shards, so that the same extraction makes them again."""
    with exit_on_errors(), ProgressBar(f"repairing {folder}"):
        repaired = repair(folder)
    for damage in repaired.removed[:_MOST_SAID]:
        out.print(str(damage), markup=False, soft_wrap=True)
    out.print(str(repaired), markup=False)


@store_app.command("merge")
def merge_command(
    folders: Annotated[
        list[str], typer.Argument(metavar="DIR", help="the stores, in the order of their rows")
    ],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="a new folder or URL")],
) -> None:
    """Make one store of several: parts of one job, or the same sites of other data."""
    with exit_on_errors(), ProgressBar(f"merging {plural(len(folders), 'store')}"):
        store = merge(folders, to)
    print_result(store)


@store_app.command("export")
def export_command(
    folder: Folder,
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="a new file or folder")],
    format_: Annotated[str, typer.Option("--format", help="parquet, datasets, npy, zarr or lance")],
    at: Annotated[
        list[str] | None, typer.Option("--at", metavar="SITE", help="a site; default: all")
    ] = None,
) -> None:
    """Write the values of a store in another format."""
    with exit_on_errors():
        if format_ not in get_args(Format):
            raise InputError(
                f"--format must be one of {', '.join(get_args(Format))}, got {format_}."
                "\nGive --format parquet."
            )
        store = open_store(folder)
        with ProgressBar(f"exporting {folder}"):
            path = store.export(to, format_, *(at or []))  # type: ignore[arg-type]
    out.print(f"written: {path}", markup=False, soft_wrap=True)


def _job_facts(store: Store) -> list[tuple[str, str]]:
    """List what a store says of its job."""
    job = store.job
    model = job.get("model", {})
    options = {name: value for name, value in job.get("options", {}).items() if value is not None}
    return [
        (
            "model",
            f"{model.get('type', 'unknown')}, weights {model.get('weights', 'unknown')[:16]}",
        ),
        ("data", ", ".join(f"{name} {value}" for name, value in job.get("data", {}).items())),
        ("options", ", ".join(f"{name} {value}" for name, value in options.items())),
        ("batches", f"of {job.get('batch_size')}, {job.get('shard_batches')} in a shard"),
        ("size", size(store.nbytes)),
        ("skipped", plural(len(store.skipped), "item")),
    ]
