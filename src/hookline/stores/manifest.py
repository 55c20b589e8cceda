"""The manifest of a store: what the job is, and once it is done, its shards.

It is written before the first shard, and once more after the last. Until then the shards
describe themselves.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hookline.display.text import first_line
from hookline.errors import FolderError
from hookline.recordings.manifest import DAMAGE, MANIFEST, sealed, unsealed
from hookline.recordings.reading import reading
from hookline.stores.manifest_form import check_manifest
from hookline.stores.place import Place
from hookline.stores.shard_file import Shard
from hookline.util.installed import package_version

FORMAT = "hookline-store"
VERSION = 1
_REMEDY = "Make it again from the shards: hookline store repair"


def environment() -> dict[str, Any]:
    """Return what decides the bits of a result besides the job.

    These are the versions, the processor, the threads, and what this process has set in torch.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": _machine(),
        "threads": torch.get_num_threads(),
        "autocast": [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in kinds],
        "matmul_precision": torch.get_float32_matmul_precision(),
        # Asked only if CUDA is in use: the question would start it.
        "gpu": torch.cuda.get_device_name() if in_use else "none",
    }


@cache
def _machine() -> str:
    """Return the type of the processor, and the vector instructions that torch uses."""
    try:
        model = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:  # no Linux
        model = None
    name = platform.processor() if model is None else model[1]
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind} {name}".rstrip()


def write_manifest(
    place: Place,
    job: Mapping[str, Any],
    about: Mapping[str, Any],
    shards: Sequence[Shard] | None = None,
) -> None:
    """Write a store's manifest, durably; an older one is replaced.

    Args:
        place: where the store is.
        job: what it holds: `Job.as_json`.
        about: where it was made: `environment`.
        shards: all of its shards, in order; None for a store that is not finished.

    Raises:
        FolderError: it cannot be written.
    """
    head = {
        "format": FORMAT, "version": VERSION, "checksum": "0" * 16, "hookline": package_version(),
    }  # fmt: skip
    # Sorted: the job of a rank has come as JSON with sorted keys, that of one process has not.
    described = json.loads(json.dumps({"environment": about, "job": job}, sort_keys=True))
    body: dict[str, Any] = {**described, "shards": None}
    if shards is not None:
        # A list for each field: 10,000 shards are read in a fifth of the time of as many objects.
        body["shards"] = {
            "batches": [shard.batches[1] for shard in shards],
            "items": [shard.items for shard in shards],
            "rows": [shard.rows for shard in shards],
            "sizes": [shard.size for shard in shards],
            "seals": [shard.seal for shard in shards],
        }
        statistics: dict[str, Any] = {}
        for shard in shards:
            for name, one in shard.statistics.items():
                statistics[name] = statistics[name] + one if name in statistics else one
        body["statistics"] = {name: one.as_json() for name, one in statistics.items()}
        body["skipped"] = [list(one) for shard in shards for one in shard.skipped]
    place.write(MANIFEST, [sealed({**head, **body})])


def read_manifest(place: Place) -> dict[str, Any] | None:
    """Read a store's manifest and verify its checksum; None if there is none.

    Raises:
        FolderError: it is of another version, damaged, or not a store's.
        UnreadableError: it cannot be read now.
    """
    try:
        with reading(f"{place}/{MANIFEST}"):
            data = place.read(MANIFEST)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FolderError(f"{place} cannot be read: {first_line(error)}.") from error
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise FolderError(
                f"{place} is not a store: its {MANIFEST} was written by something else."
                "\nGive the folder that hl.extract wrote, or a new one."
            )
        if manifest.get("version") != VERSION:
            raise FolderError(
                f"{place} is a store of version {manifest.get('version')}; this hookline reads"
                f" version {VERSION}.\nOpen it with the hookline that wrote it"
                f" ({manifest.get('hookline', 'unknown')}), or extract it again."
            )
        unsealed(data)
        check_manifest(manifest)
    except FolderError:
        raise
    except DAMAGE as error:
        raise FolderError(
            f"{place} is damaged: its {MANIFEST}: {first_line(error)}.\n{_REMEDY} {place}"
        ) from error
    return manifest
