"""The slots of a site, filled by several threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from counted_operations import CountedOperations
from hookline.engine import Site
from hookline.statistics import moments as moments_statistic
from hookline.verbs.monitor import slots as module
from hookline.verbs.monitor.slots import Slots
from second_thread import Meanwhile, ToldLock


class Count:
    """Counts elements; another thread acts while the first empty slots are made."""

    def __init__(self):
        self.meanwhile = None

    def start(self, value):
        self.meanwhile()
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + value.numel()


def test_a_value_waits_while_another_thread_makes_slots():
    count = Count()
    slots = Slots((count,), 1)
    slots.lock = ToldLock()
    site = slots.slots_of_site(Site("fc"), (0, 0))
    count.meanwhile = Meanwhile(lambda: site.add(torch.ones(3)), slots.lock)
    site.add(torch.ones(4))
    count.meanwhile.end()
    assert not site.is_off
    assert [one.tolist() for one in site.pop_slots()] == [[7.0]]


def test_a_statistic_whose_slots_are_no_flat_tensor_is_named():
    for made in ([0.0], None, torch.zeros(2, 2)):
        count = Count()
        count.meanwhile, count.start = None, lambda value, made=made: made
        slots = Slots((count,), 1)
        site = slots.slots_of_site(Site("fc"), (0, 0))
        site.add(torch.ones(4))
        with pytest.warns(hl.HooklineWarning, match=r"Count\.start must return a flat float64"):
            slots.warn_of_complaints()
        assert site.is_off


# -- values that wait, to be measured together ----------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Have values on the CPU measured as those on a GPU."""
    monkeypatch.setattr(moments_statistic, "_NOT_BATCHED", frozenset({"meta"}))


def moments_of(*values):
    """The slots of values that are measured one by one."""
    moments = hl.stats.moments(compile=False)
    slots = moments.start(values[0])
    for value in values:
        slots = moments._add_part_to_slots(slots, value)
    return slots


def take(site):
    (slots,) = site.pop_slots()
    return slots


@pytest.mark.usefixtures("as_on_a_gpu")
def test_values_that_wait_are_those_of_their_time():
    slots = Slots((hl.stats.moments(),), 2)
    first, second = (slots.slots_of_site(Site(name), (n, 0)) for n, name in enumerate("ab"))
    value = torch.randn(5)
    before = value.clone()
    first.add(value)
    second.add(value[:3])
    value.zero_()
    second.add(torch.ones(2))
    torch.testing.assert_close(take(first), moments_of(before))
    torch.testing.assert_close(take(second), moments_of(before[:3], torch.ones(2)))
    assert first.pop_slots() is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_values_do_not_wait_for_more_than_is_kept(monkeypatch):
    monkeypatch.setattr(module, "_MOST_DEFERRED", 9)
    slots = Slots((hl.stats.moments(),), 3)
    sites = [slots.slots_of_site(Site(name), (n, 0)) for n, name in enumerate("abc")]
    for site in sites:
        site.add(torch.ones(4))
    assert not slots._deferred
    assert [take(site)[0].item() for site in sites] == [4.0, 4.0, 4.0]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_values_on_another_stream_do_not_wait(monkeypatch):
    for place in (module, moments_statistic):
        monkeypatch.setattr(place, "is_on_default_stream", lambda device: False)
    slots = Slots((hl.stats.moments(),), 1)
    site = slots.slots_of_site(Site("fc"), (0, 0))
    site.add(torch.ones(4))
    assert not slots._deferred
    assert hl.stats.moments().measure_many([torch.ones(4, dtype=torch.float16)]) is None
    assert take(site)[0] == 4


@pytest.mark.usefixtures("as_on_a_gpu")
def test_values_apart_wait_apart():
    slots = Slots((hl.stats.moments(),), 1)
    site = slots.slots_of_site(Site("fc"), (0, 0))
    site.add(torch.ones(2))
    site.add_to_pass_slots(torch.zeros(3))
    site.add(torch.ones(2))
    assert take(site)[0] == 4
    with slots.use_pass_slots([site]):
        assert take(site)[0] == 3


@pytest.mark.usefixtures("as_on_a_gpu")
def test_values_that_fail_together_are_measured_alone(monkeypatch):
    def out_of_memory(tensors):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(moments_statistic, "batched_moments", out_of_memory)
    slots = Slots((hl.stats.moments(),), 1)
    site = slots.slots_of_site(Site("fc"), (0, 0))
    site.add(torch.ones(4))
    assert take(site)[0] == 4


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_site_that_was_left_out_no_longer_waits():
    slots = Slots((hl.stats.moments(),), 2)
    first, second = (slots.slots_of_site(Site(name), (n, 0)) for n, name in enumerate("ab"))
    first.add(torch.ones(4))
    second.add(torch.ones(4))
    first.add(torch.ones(4, dtype=torch.int32))
    assert first.is_off
    assert first.pop_slots() is None
    assert take(second)[0] == 4


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_monitored_step_measures_all_values_by_few_operations():
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def operations():
        with CountedOperations() as counted:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return counted.count

    operations()  # makes the gradients, to which later ones are added
    alone = operations()
    with hl.monitor(model, ports=("output", "value", "grad", "update")) as seen:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        # A copy of each output, and for the 280 values what one takes, four times.
        assert operations() - alone < 40 + 4 * 35
    assert len(seen["39"].results) == 4
