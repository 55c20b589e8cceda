"""Folders of each version, kept in tests/kept: later versions open them, or say the way on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hookline as hl

KEPT = Path(__file__).parent / "kept"
X = torch.arange(12.0).reshape(4, 3)
FC = torch.tensor([[6.0, 13.0], [15.0, 49.0], [24.0, 85.0], [33.0, 121.0]])


def folders(kind: str) -> list[str]:
    """Return the kept folders of a kind, of all versions."""
    return sorted(str(path.relative_to(KEPT)) for path in KEPT.glob(f"*/{kind}*"))


@pytest.mark.parametrize("folder", [name for name in folders("recording") if "first" not in name])
def test_a_recording_of_each_version_has_its_values(folder):
    run = hl.open(KEPT / folder, verify=True)
    assert [record.failed for record in run.passes] == [False, False]
    for record, x in zip(run.passes, (X, X + 1), strict=True):
        assert torch.equal(record["fc"], FC + torch.tensor([3.0, 12.0]) * (record.number == 1))
        value = record["mixed"]
        assert torch.equal(value["pair"][0], x * 2)
        assert value["pair"][1] is None
        assert torch.equal(value["half"], x.to(torch.bfloat16))
        assert torch.equal(value["mask"], x > 6)
        assert (value["count"], value["text"]) == (3, "as it is")
    assert run.modules == {"": "Net", "fc": "Linear", "mixed": "Mixed"}


def test_a_recording_of_format_1_says_the_way_on():
    with pytest.raises(hl.FolderError) as error:
        hl.open(KEPT / "0.1.0/recording-first")
    assert str(error.value) == (
        f"{KEPT / '0.1.0/recording-first'} is a recording of version 1; this hookline reads version"
        " 2.\nOpen it with the hookline that wrote it (0.1.0), or record it again."
    )


@pytest.mark.parametrize("folder", folders("store"))
def test_a_store_of_each_version_has_its_rows(folder):
    store = hl.open(KEPT / folder, verify=True)
    assert torch.equal(store["fc"][:], FC)
    assert store.job["batch_size"] == 2
    assert store.statistics["fc"].mean == FC.mean()


@pytest.mark.parametrize("folder", folders("run"))
def test_a_run_of_each_version_has_its_curves(folder):
    seen = hl.open(KEPT / folder)
    assert seen.steps.tolist() == [0, 1]
    assert seen["fc"].mean.tolist() == [43.25, -169.75]
    assert (seen["fc.weight:grad"].norm ** 2).tolist() == pytest.approx([2968, 4120])


def test_folders_of_0_2_0_say_where_they_come_from():
    run, store, seen = (hl.open(KEPT / "0.2.0" / kind) for kind in ("recording", "store", "run"))
    for opened in (run, seen):
        assert opened.provenance.device == "cpu"
        assert len(opened.provenance.fingerprint) == 16
        assert opened.provenance.flags["deterministic algorithms"] == "off"
    assert run.provenance.flags["seed"] == str(run.passes[0].settings.seed)
    for opened in (run, store, seen):
        assert opened.provenance.versions["hookline"] == "0.2.0"
        assert opened.provenance.versions["torch"] == "2.13.0+cpu"


def test_folders_of_0_1_0_tell_versions_and_no_device():
    provenance = hl.open(KEPT / "0.1.0/recording").provenance
    assert provenance.versions["hookline"] == "0.1.0"
    assert (provenance.device, provenance.flags) == ("", {})
    assert hl.open(KEPT / "0.1.0/store-first").provenance.versions["hookline"] == "0.1.0"
