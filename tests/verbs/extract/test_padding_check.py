"""What `keep=` makes of padding."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hookline as hl

IDS = torch.tensor([[3, 7, 5, 2], [4, 9, 0, 0], [4, 1, 6, 0]])


def extracted(folder, keep, mask=IDS > 0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 5), nn.Tanh())
    given = {"input": IDS, "attention_mask": mask}
    return hl.extract(
        model, given, "1", to=folder, keep=keep, inputs=lambda batch: batch["input"], **options
    )


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t.mean(1),
        lambda t: t[:, -1],
        lambda t: t.argmax(1),
        lambda t: (t > 0).sum(1),
        lambda t: t - t.mean(1, keepdim=True),
    ],
)
def test_what_reads_padding_is_told(tmp_path, keep):
    with pytest.warns(hl.HooklineWarning, match=r"^keep= reads padding.*\n.*of_items") as caught:
        extracted(tmp_path / "a", keep, batch_size=1)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extracted(tmp_path / "b", keep, mask=torch.ones(3, 4))


def test_padding_in_a_structure_is_told(tmp_path):
    model = nn.Sequential(nn.Embedding(10, 5), nn.LSTM(5, 6, batch_first=True))
    given = {"input": IDS, "attention_mask": IDS > 0}

    def extract(name, keep):
        hl.extract(
            model, given, "1", to=tmp_path / name, keep=keep, inputs=lambda batch: batch["input"]
        )

    extract("a", lambda output: output[0][:, 0])
    with pytest.warns(hl.HooklineWarning, match="^keep= reads padding"):
        extract("b", lambda output: output[0].mean(1))


@pytest.mark.parametrize(
    ("keep", "mask"),
    [
        (lambda t: t[:, 0], IDS > 0),
        (lambda t: t[:, -1], IDS.flip(1) > 0),
        (lambda t: t.half(), IDS > 0),
        (nn.Linear(5, 2), IDS > 0),
    ],
)
def test_what_reads_no_padding_is_not_told(tmp_path, keep, mask):
    extracted(tmp_path / "a", keep, mask)


def test_the_check_changes_no_random_number(tmp_path):
    kept = [
        extracted(tmp_path / name, lambda t: (t + torch.rand_like(t))[:, 0], mask, batch_size=2)
        for name, mask in (("a", IDS > 0), ("b", torch.ones(3, 4)))
    ]
    assert torch.equal(kept[0]["1"][:], kept[1]["1"][:])
