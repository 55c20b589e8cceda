"""torch's stack of function modes, and whose frame a call comes from."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookline.engine.torch_private.dynamo import OLD_DYNAMO
from hookline.engine.torch_private.graph import function_modes as internals


class Mode(TorchFunctionMode):
    """Calls a function with the frame of each call of relu."""

    def __init__(self, see=None):
        super().__init__()
        self.see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_relu = getattr(func, "__name__", "") == "relu"
        if self.see is not None and is_relu and not torch.compiler.is_dynamo_compiling():
            self.see(sys._getframe(1))
        return func(*args, **(kwargs or {}))


# -- the stack of modes ----------------------------------------------------------------------------


def test_only_the_innermost_mode_is_turned_off():
    """If torch's stack moves, a mode that an interrupt left stays on for the whole program."""
    outer, inner = Mode(), Mode()
    internals.pop_if_innermost(outer)  # none is on
    with outer:
        assert internals.n_modes() == 1
        with inner:
            internals.pop_if_innermost(outer)
            assert internals.n_modes() == 2
        internals.pop_if_innermost(inner)
        assert internals.n_modes() == 1
        internals.pop_if_innermost(outer)
        assert internals.n_modes() == 0
        internals._push_mode(outer)


def test_unwanted_modes_are_dropped_and_others_keep_their_order():
    modes = [Mode() for _ in range(4)]
    for mode in modes:
        mode.__enter__()
    try:
        internals.drop_modes(lambda mode: False)
        assert internals.n_modes() == 4
        internals.drop_modes(lambda mode: mode in modes[1::2])
        assert [internals._mode_at(k) for k in range(internals.n_modes())] == modes[::2]
    finally:
        internals.drop_modes(lambda mode: mode in modes)
    assert internals.n_modes() == 0


# -- the frames of a module's call -----------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x):
        return helper(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)


def helper(x):
    return F.relu(x)


def _calling(model, *args):
    """Return what `calling_module` says at each relu."""
    said = []
    with Mode(lambda frame: said.append(internals.calling_module(frame))):
        model(*args)
    return said


@pytest.mark.parametrize("has_hook", [False, True])
def test_the_innermost_module_is_that_whose_forward_calls(has_hook):
    model, x = Outer(), torch.ones(1)
    if has_hook:  # torch then calls the forward in an inner function
        model.inner.register_forward_hook(lambda *_: None)
    [(module, code, frame)] = _calling(model, x)
    assert module is model.inner
    assert code is Inner.forward.__code__  # and not that of the helper, nor torch's own
    assert frame.f_code.co_name == "_call_impl"
    outer, code, _ = internals.calling_module(frame.f_back)
    assert outer is model
    assert code is Outer.forward.__code__


def test_no_module_calls_what_runs_outside():
    assert internals.calling_module(sys._getframe()) == (None, None, None)
    assert internals.calling_module(None) == (None, None, None)


class Hook:
    """A hook that is an object."""

    def __call__(self, module, args, output=None):
        F.relu(torch.ones(1))


class Method:
    def hook(self, module, args, output=None):
        F.relu(torch.ones(1))


def _hook_with(option, module, args, output=None):
    F.relu(torch.ones(1))


def _global(register):
    return lambda module, hook: register(hook)


HOOKS = {
    "function": lambda: lambda *_: F.relu(torch.ones(1)),
    "partial": lambda: functools.partial(_hook_with, 1),
    "object": Hook,
    "method": lambda: Method().hook,
}
REGISTER = {
    "pre": nn.Module.register_forward_pre_hook,
    "forward": nn.Module.register_forward_hook,
    "global pre": _global(nn.modules.module.register_module_forward_pre_hook),
    "global forward": _global(nn.modules.module.register_module_forward_hook),
}


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hooks_calls_are_told_from_the_forwards(kind, hook):
    """If torch renames its hook dictionaries, calls in hooks count as the module's own."""
    model = Inner()
    handle = REGISTER[kind](model, HOOKS[hook]())
    try:
        said = _calling(model, torch.ones(1))
        by_hook = [internals.is_hook_code(code, module) for module, code, _ in said]
    finally:
        handle.remove()
    assert by_hook == ([True, False] if "pre" in kind else [False, True])


def test_a_forward_that_is_also_a_hook_is_the_forward():
    model = Inner()
    model.register_forward_hook(lambda *_: None)
    hook = next(iter(model._forward_hooks.values()))
    model.forward = functools.partial(hook)  # the same code
    assert not internals.is_hook_code(hook.__code__, model)


# -- compiled code ---------------------------------------------------------------------------------


@torch.compiler.disable
def _outside(x):
    return torch.relu(x)


def _function(x):
    return torch.relu(_outside(torch.relu(x * 2)) + 1)


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
def test_calls_of_a_graph_are_told_from_those_beside_it():
    """If dynamo calls its graphs in another way, operations are recorded twice."""
    compiled, x = torch.compile(_function, backend="eager"), torch.ones(3)
    here, said = sys._getframe(), []
    with Mode(lambda frame: said.append(internals.runs_compiled_graph(frame, here))):
        compiled(x)
        assert said == [True, False, True]  # the second runs by itself: it is no part of a graph
        said.clear()
        _function(x)
        assert said == [False] * 3
        said.clear()

        torch.compile(helper, backend="eager", fullgraph=True)(x)
        assert said == [True]


class Traced(nn.Module):
    """A module whose first argument has a name of its own, and that calls itself in a cell."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner

    def forward(this, x):
        def again():
            return this.inner(x) if this.inner is not None else torch.relu(x)

        return again()


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_modules_that_dynamo_traces_are_known_inside_out():
    """If dynamo's frames move, operations in compiled code belong to no module."""
    model = Traced(Traced())
    said = []

    class Asking(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            ask()
            return func(*args, **(kwargs or {}))

    @torch._dynamo.assume_constant_result
    def ask():
        said.append(list(internals.traced_calling_modules()))

    def run(x):
        with Asking():
            return model(x)

    torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2))
    distinct = [list(dict.fromkeys(modules)) for modules in said]
    assert [model.inner, model] in distinct


# -- names -----------------------------------------------------------------------------------------


def test_only_methods_that_call_super_are_called_by_name():
    """If torch rewrites them, dynamo breaks the graph at `x.unflatten(...)`."""
    assert internals.method_name_for_dynamo(Tensor.unflatten) == "unflatten"
    assert internals.method_name_for_dynamo(Tensor.relu) == ("relu" if OLD_DYNAMO else "")
    others = Tensor.split, torch.relu, F.relu, len, functools.partial(F.relu)
    assert [internals.method_name_for_dynamo(function) for function in others] == [""] * len(others)

    class Other(Tensor):
        def unflatten(self, *args):
            return super().unflatten(*args)

    assert internals.method_name_for_dynamo(Other.unflatten) == ""


def test_a_program_of_export_is_told_from_a_traced_module():
    class Adds(nn.Module):
        def forward(self, x):
            return x + 1

    x = torch.ones(2)
    assert internals.is_exported(torch.export.export(Adds(), (x,)).module())
    assert not internals.is_exported(torch.fx.symbolic_trace(Adds()))
    assert not internals.is_exported(Adds())


# -- code that is compiled by itself ---------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_function_is_compiled_as_a_part_and_not_by_itself():
    @internals.run_eagerly_by_itself
    def is_compiled():
        return torch.compiler.is_dynamo_compiling()

    def gives_up(x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return is_compiled()

    x = torch.ones(2)
    assert not torch.compile(gives_up, backend="eager")(x)
    assert torch.compile(lambda x: x + is_compiled(), backend="eager", fullgraph=True)(x)[0] == 2
