"""A recording's folder of any size that takes no room on the disk: its tensors are holes, zeros."""

from __future__ import annotations

import json
from pathlib import Path

from hookline.files.sealed_json import MANIFEST, checksum, seal_json
from hookline.recordings.atomic_replace import RECORDING


def write(folder: Path, n_sites: int, site_bytes: int, per_file: int = 80) -> Path:
    """Write a recording of outputs of convolutions, one pass, as `run.save` would lay it out.

    Args:
        folder: where.
        n_sites: how many values.
        site_bytes: the size of each.
        per_file: how many lie in one file.
    """
    folder.mkdir(parents=True)
    shape = [8, 64, int((site_bytes / 4 / 8 / 64) ** 0.5)]
    shape.append(site_bytes // (4 * 8 * 64 * shape[2]))
    size = 4 * shape[0] * shape[1] * shape[2] * shape[3]
    of_zeros = checksum(bytes(size))
    values, sums = [], {}
    for start in range(0, n_sites, per_file):
        numbers = range(start, min(start + per_file, n_sites))
        name = f"values-0-{start // per_file:05}.safetensors"
        head = json.dumps({
            str(k): {"dtype": "F32", "shape": shape, "data_offsets": [k * size, (k + 1) * size]}
            for k in range(len(numbers))
        }).encode()  # fmt: skip
        head += b" " * (-len(head) % 8)
        head = len(head).to_bytes(8, "little") + head
        with (folder / name).open("wb") as file:
            file.write(head)
            file.truncate(len(head) + len(numbers) * size)
        sums[name] = [checksum(head), *[of_zeros] * len(numbers)]
        values += [[number, {"tensor": f"{name}/{number - start}"}] for number in numbers]
    paths = [f"layer{k // 100}.block{k // 10 % 10}.conv{k % 10}" for k in range(n_sites)]
    holders = {path.rpartition(".")[0]: "Block" for path in paths}
    sites = [
        {"path": path, "port": "output", "leaf": [], "call": None, "aliases": [], "type": "Conv2d"}
        for path in paths
    ]
    manifest = {
        **RECORDING.first_keys(), "torch": "0",
        "model": "Large", "sites": sites,
        "modules": [[path, kind] for path, kind in holders.items()]
        + [[path, "Conv2d"] for path in paths],
        "report": {
            "name": "hl.record", "passes": 1, "other_contexts": 0, "fired": [1] * n_sites,
            "why": {},
            "excused": [],
        },
        "lost": [],
        "checksums": sums,
        "passes": [{"number": 0, "failed": False, "values": values}],
    }  # fmt: skip
    (folder / MANIFEST).write_bytes(seal_json(manifest))
    return folder
