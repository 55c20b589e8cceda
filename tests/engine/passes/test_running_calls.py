"""RunningCalls: the calls of a module that are under way."""

from __future__ import annotations

import sys

from hookline.engine.passes.running_calls import RunningCalls


def test_calls_cleared_at_any_moment_of_an_end_raise_nothing():
    """Another thread clears them as it ends the line; here, each instruction of `end` in turn."""
    frame, n_instructions, moment = sys._getframe(), 0, 0
    before = sys.gettrace()
    frame.f_trace_opcodes = True  # Python 3.12 traces opcodes from the settrace after this on
    while moment <= n_instructions:
        calls, n_instructions = RunningCalls(), 0
        calls.begin(frame)

        def at_instruction(_, event, __, calls=calls, moment=moment):
            nonlocal n_instructions
            n_instructions += event == "opcode"
            if n_instructions == moment:
                calls.clear()
            return at_instruction

        def at_call(called, *_, trace=at_instruction):
            if called.f_code is not RunningCalls.end.__code__:
                return None
            called.f_trace = trace  # Python 3.13 traces no opcodes of a frame that has none
            called.f_trace_opcodes = True
            return trace

        sys.settrace(at_call)
        try:
            calls.end(frame)
        finally:
            sys.settrace(before)
        assert len(calls) == 0
        moment += 1
    assert n_instructions > 10
