"""What is said of hooks in compiled code; here of torch before 2.13, whichever torch is there."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.gradients.ports import all_at
from hookline.engine.line.compile_messages import refuse_reversed
from hookline.engine.torch_private.dynamo import TracingAttachError

SITE = "0:grad_output"
LINES = {
    "record": lambda model: hl.record(model, SITE),
    "edit": lambda model: hl.edit(model, SITE, hl.edits.scale(2.0)),
}


def taps_of(names, stack):
    model = nn.Sequential(nn.Linear(2, 2))
    for name in names:
        stack.enter_context(LINES[name](model))
    model(torch.ones(1, 2)).sum().backward()  # or the lines warn that they saw nothing
    taps = all_at(model[0], "grad_output")
    assert len(taps) == len(names)
    return model[0], taps


@pytest.mark.parametrize("names", [["record", "edit"], ["edit", "record"], ["edit", "edit"]])
def test_two_lines_are_refused_if_one_changes_the_gradient(names):
    with ExitStack() as stack:
        module, taps = taps_of(names, stack)
        for tap in taps:
            with pytest.raises(TracingAttachError, match=r"0:grad_output.*\n.*2.13 or newer"):
                refuse_reversed(tap, module)


@pytest.mark.parametrize("names", [["edit"], ["record"], ["record", "record"]])
def test_a_line_alone_and_lines_that_only_read_are_not_refused(names):
    with ExitStack() as stack:
        module, taps = taps_of(names, stack)
        for tap in taps:
            refuse_reversed(tap, module)
