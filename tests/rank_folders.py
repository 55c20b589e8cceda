"""Folders as the ranks of a distributed job save them, made in one process."""

from __future__ import annotations

import json

from hookline.files.sealed_json import MANIFEST, seal_json


def folder_of_ranks(folder, runs):
    """Lay out what the ranks of a distributed job save."""
    folder.mkdir(parents=True)
    sums = {}
    for rank, run in enumerate(runs):
        part = run.save(folder / f"rank{rank}")
        sums[part.name] = json.loads((part / MANIFEST).read_text())["checksum"]
    manifest = json.loads((part / MANIFEST).read_text())
    head = {key: manifest[key] for key in ("format", "version", "checksum", "hookline", "torch")}
    (folder / MANIFEST).write_bytes(seal_json({**head, "ranks": sums}))
    return folder
