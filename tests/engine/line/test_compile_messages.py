"""What is said of hooks in compiled code, beside the real errors of tests/regimes."""

from __future__ import annotations

from torch import nn

from hookline.engine.line.compile_messages import note_on, stale_forward
from hookline.engine.selection.site import Site

SITE = Site("fc", module_type="Linear")


class Unsupported(Exception):
    """Named as dynamo's error for code that it cannot trace."""


class FailOnRecompileLimitHit(Exception):
    """Named as dynamo's error."""


def test_what_dynamo_cannot_trace_is_said_of_the_last_hook():
    value, gradient = SITE, Site("fc", "grad_output", module_type="Linear")
    assert "the hook at fc (Linear) cannot be" in note_on(Unsupported(), value)
    assert "the gradients at fc:grad_output (Linear) cannot" in note_on(Unsupported(), gradient)
    assert note_on(Unsupported(), None) is None


def test_at_the_recompile_limit_the_causes_are_named():
    assert "torch._dynamo.config.recompile_limit" in note_on(FailOnRecompileLimitHit(), SITE)
    assert "torch._dynamo.config.recompile_limit" in note_on(FailOnRecompileLimitHit(), None)


def test_other_errors_get_no_note():
    assert note_on(ValueError("mine"), SITE) is None


def test_a_stale_forward_is_named_by_the_class():
    assert stale_forward(nn.Linear(1, 1)).startswith("Linear got another forward")
