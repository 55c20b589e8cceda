"""offload: values come to the CPU whole, and bring no more memory than their rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.stores.batch_columns import CpuOffload

CPU = torch.device("cpu")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a CUDA device")


def test_rows_of_a_larger_value_leave_the_rest_behind():
    whole = torch.randn(1000, 4)
    rows = CpuOffload(CPU)(whole[10:20])
    assert torch.equal(rows, whole[10:20])
    assert rows.untyped_storage().nbytes() == rows.nbytes


def test_a_value_that_lies_across_memory_is_made_contiguous():
    value = torch.randn(3, 5, requires_grad=True).t()
    copy = CpuOffload(CPU)(value)
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert torch.equal(copy, value)


def test_a_whole_value_on_the_cpu_is_not_copied_again():
    value = torch.randn(3, 5)
    offload = CpuOffload(CPU)
    assert offload(value).data_ptr() == value.data_ptr()
    assert offload.make_waiter()() is None


@on_a_gpu
def test_a_gpu_value_lies_in_pinned_memory_when_ready():
    offload = CpuOffload(torch.device("cuda"))
    values = [torch.randn(256, 1024, device="cuda") for _ in range(8)]
    copies = [offload(value) for value in values]
    offload.make_waiter()()
    assert all(copy.is_pinned() for copy in copies)
    assert all(torch.equal(copy, value.cpu()) for copy, value in zip(copies, values, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two CUDA devices")
def test_values_of_another_gpu_are_there_at_once():
    value = torch.randn(1 << 24, device="cuda:1")
    copy = CpuOffload(torch.device("cuda:0"))(value)
    assert torch.equal(copy, value.cpu())


@on_a_gpu
def test_gpu_memory_is_not_reused_while_it_is_copied():
    offload = CpuOffload(torch.device("cuda"))
    copies = []
    for number in range(200):
        value = torch.full((1 << 20,), float(number), device="cuda")
        copies.append(offload(value))
        del value  # the allocator may give its memory to the next one
    offload.make_waiter()()
    assert [copy.unique().tolist() for copy in copies] == [[float(n)] for n in range(200)]


@on_a_gpu
def test_a_store_from_a_gpu_holds_the_models_values(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(inplace=True), nn.Linear(512, 64)).cuda()
    rows = torch.randn(5000, 64)
    store = hl.extract(
        model, rows, ["0", "1", "2"], tmp_path / "s", batch_size=50, shard_bytes=500_000
    )
    with torch.no_grad():
        for start in range(0, 5000, 50):
            values = [model[0](rows[start : start + 50].cuda())]
            values.append(values[0].relu())
            values.append(model[2](values[1]))
            for site, value in zip(("0", "1", "2"), values, strict=True):
                assert torch.equal(store[site][start : start + 50], value.cpu()), (site, start)


@pytest.mark.parametrize("name", ["@item", "@length", "@token", "__metadata__"])
def test_a_module_named_like_what_a_store_writes_is_refused(tmp_path, name):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    with pytest.raises(hl.StructureError) as told:
        hl.extract(model, torch.ones(3, 2), model[0], tmp_path / "store")
    assert str(told.value) == (
        f"a site must not have the name of what the store itself writes, got {name!r}."
        "\nGive the module another name, or leave it out."
    )
