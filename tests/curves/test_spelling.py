"""Statistics in the folder of a run: those of `hl.stats` are made again with their options."""

from __future__ import annotations

import json

import pytest
import torch

import hookline as hl
from hookline.curves.spelling import read_statistic, spell_statistic


@pytest.mark.parametrize(
    "statistic",
    [
        hl.stats.moments(compile=False),
        hl.stats.histogram(low=0.1, high=10, per_octave=4),
        hl.stats.quantiles((0.1, 0.9), error=0.1, low=1e-3),
        hl.stats.covariance(),
    ],
    ids=lambda statistic: type(statistic).__name__,
)
def test_a_statistic_is_made_again_from_json(statistic):
    again = read_statistic(json.loads(json.dumps(spell_statistic(statistic))))
    x = torch.randn(20, 3)
    slots = statistic.update(statistic.start(x), x)
    torch.testing.assert_close(again.update(again.start(x), x), slots)
    assert str(again.result(slots)) == str(statistic.result(slots))


def test_one_of_a_users_class_gives_its_slots():
    class Own:
        pass

    again = read_statistic(json.loads(json.dumps(spell_statistic(Own()))))
    assert again.result(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(hl.FolderError, match=r"the statistic Own must be known to measure"):
        again.start(torch.ones(1))
