"""Arrays that share a tensor's memory."""

from __future__ import annotations

import torch
from torch import nn

import hookline as hl
from hookline.util.view_as_array import view_as_array


def test_an_array_shares_memory_that_can_still_be_resized():
    tensor = nn.Parameter(torch.arange(6.0).view(2, 3))
    array = view_as_array(tensor.t())
    assert array.tolist() == tensor.t().tolist()
    with torch.no_grad():
        tensor[0, 0] = 7
    assert array[0, 0] == 7
    assert not array.flags.writeable
    assert tensor.untyped_storage().resizable()


def test_a_conjugate_and_its_negative_part_are_resolved():
    conjugate = torch.tensor([1 + 2j]).conj()
    assert view_as_array(conjugate).tolist() == [1 - 2j]
    assert view_as_array(conjugate.imag).tolist() == [-2.0]


def test_what_was_measured_or_saved_can_still_be_resized(tmp_path):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.monitor(model, ports=("input", "output", "grad_output", "grad", "value")):
        for _ in range(2):
            output = model(x)
            output.sum().backward()
            optimizer.step()
    with hl.record(model, ports=("input", "output", "grad")) as run:
        model(x).sum().backward()
    run.save(tmp_path / "run")
    run.findings()
    hl.extract(model, x, "(root)", to=tmp_path / "store")
    tensors = [x, output, model.weight, model.bias, model.weight.grad, run["(root)"]]
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
