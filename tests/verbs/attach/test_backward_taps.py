"""Raw backward hooks beside torch's own: the same where torch is right, right where it is not."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import hookline as hl
from zoo import Out, Two


class Inside(nn.Module):
    """A module between two layers, called and used as a test says."""

    def __init__(self, inner, use=lambda inner, h: inner(h)):
        super().__init__()
        self.stem, self.inner, self.use = nn.Linear(3, 3), inner, use

    def forward(self, x):
        found = self.use(self.inner, self.stem(x))
        parts = found if isinstance(found, tuple) else (found,)
        return sum(((k + 1) * part.square()).sum() for k, part in enumerate(parts))


class Square(nn.Module):
    """Saves its input: a second derivative comes back to it past the output."""

    def forward(self, x):
        return x**2


class Keeping(nn.Module):
    """Keeps its output, as modules that show their attention do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.kept = self.linear(x)
        return self.kept


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.weight


NO_INPUT = "no input with gradient"
CASES = {
    "layer": lambda: Inside(nn.Linear(3, 3)),
    "twice": lambda: Inside(nn.Tanh(), lambda m, h: m(m(h))),
    "two of each": lambda: Inside(Two(), lambda m, h: m(h, h * 2)),
    "past it, too": lambda: Inside(nn.Linear(3, 3), lambda m, h: m(h) + h),
    "its input": lambda: Inside(nn.Identity(), lambda m, h: m(h) * h),
    "its parameter": lambda: Inside(OwnParameter(), lambda m, h: m(h) * h),
    NO_INPUT: lambda: Inside(nn.Linear(3, 3), lambda m, h: m(h.detach())),
    "a container": lambda: Inside(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Identity())),
}
RUNS = {
    "backward": lambda model, x: model(x).backward(),
    "backward twice": lambda model, x: [
        loss.backward(retain_graph=True) for loss in [model(x)] for _ in range(2)
    ],
    "autograd.grad": lambda model, x: torch.autograd.grad(model(x), x, allow_unused=True),
    "inputs=": lambda model, x: model(x).backward(inputs=[model.stem.weight, x]),
    "parameters": lambda model, x: torch.autograd.grad(
        model(x), list(model.parameters()), allow_unused=True
    ),
    "two passes": lambda model, x: (model(x) * model(x)).backward(),
}


def plain(grads):
    return None if grads is None else [None if g is None else g.detach().clone() for g in grads]


def same(found, expected):
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected if not isinstance(found, torch.Tensor) else False


@contextmanager
def hooked(by, model, back, pre):
    if by == "torch":
        handles = [
            model.inner.register_full_backward_hook(back),
            model.inner.register_full_backward_pre_hook(pre),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, when no input needs a gradient
            yield
        for handle in handles:
            handle.remove()
    else:
        with hl.attach(model) as line:
            line.options.quiet = True
            line.backward("inner", back)
            line.backward_pre("inner", pre)
            yield


def seen_by(by, make, run, change):
    """What the hooks are given, in order, and the gradients that come of it."""
    torch.manual_seed(0)
    model, x, seen = make(), torch.randn(2, 3, requires_grad=True), []

    def back(module, grad_input, grad_output):
        seen.append(("after", type(module), plain(grad_input), plain(grad_output)))
        if change and any(g is not None for g in grad_input):
            return tuple(None if g is None else g * 2 + 1 for g in grad_input)
        return None

    def pre(module, grad_output):
        seen.append(("before", type(module), plain(grad_output)))
        return tuple(g * 3 - 1 for g in grad_output) if change else None

    with hooked(by, model, back, pre):
        result = run(model, x)
    gradients = [p.grad for p in [x, *model.parameters()]]
    return seen, [*gradients, *(result if isinstance(result, tuple) else ())]


@pytest.mark.parametrize("change", [False, True], ids=["look", "change"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_hooks_are_given_what_torchs_are_with_the_same_effect(case, run, change):
    expected = seen_by("torch", CASES[case], RUNS[run], change)
    found = seen_by("hookline", CASES[case], RUNS[run], change)
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])
    # Where nothing is wanted of what lies behind the module, nothing comes back through it.
    behind = run in ("autograd.grad", "inputs=") and case in ("its parameter", NO_INPUT)
    assert bool(expected[0]) is not behind


# -- where torch is not right ---------------------------------------------------------------------


@pytest.mark.parametrize("use", ["one output", "an input without gradient"])
def test_an_input_that_nothing_came_back_to_has_none_not_zeros(use):
    class Apart(nn.Module):
        def forward(self, a, b):
            return a * 2, b * 3

    def one_output(inner, h):
        return inner(h, h * 2)[0]

    def one_input(inner, h):
        return inner(h, torch.ones(2, 3))[0]

    seen = {}
    for by in ("torch", "hookline"):
        model = Inside(Apart(), one_output if use == "one output" else one_input)

        def note(module, grad_input, grad_output, by=by):
            seen[by] = grad_input, grad_output

        with hooked(by, model, note, lambda *_: None):
            model(torch.ones(2, 3)).backward()
    assert not seen["torch"][0][1].any()
    assert seen["hookline"][0][1] is None
    assert seen["torch"][1][1] is seen["hookline"][1][1] is None


class Formed(nn.Module):
    """Gives its result in a structure."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x, *, scale):
        return self.form(x * scale)


FORMS = {"dict": lambda t: {"hidden": t}, "list": lambda t: [t], "dataclass": Out}


@pytest.mark.trap(23)
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("form", FORMS)
def test_structured_outputs_are_given_where_torch_skips_them(form):
    def use(inner, h):
        found = inner(h, scale=scale)
        return found.hidden if form == "dataclass" else found[0 if form == "list" else "hidden"]

    scale, seen = torch.full((2, 3), 2.0, requires_grad=True) * 1, {}
    for by in ("torch", "hookline"):
        seen[by] = []
        model = Inside(Formed(FORMS[form]), use)
        with hooked(by, model, lambda m, *grads: seen[by].append(grads), lambda *_: None):  # noqa: B023
            model(torch.ones(2, 3)).backward(retain_graph=True)
    assert seen["torch"] == []
    (((of_x, of_scale), of_output),) = seen["hookline"]
    assert type(of_output) is {"dict": dict, "list": tuple, "dataclass": Out}[form]
    h = model.stem(torch.ones(2, 3))
    torch.testing.assert_close(of_x, 4 * h * scale * scale / 2)
    torch.testing.assert_close(of_scale, 2 * h * h * scale)


@pytest.mark.trap(23)
def test_keyword_arguments_are_given_where_torch_leaves_them_out():
    # What comes in by position is data: it needs no gradient.
    use = lambda inner, h: inner(h.detach(), scale=h * 2)  # noqa: E731
    model, seen = Inside(Formed(torch.Tensor.clone), use), {}
    with (
        hooked("torch", model, lambda m, *grads: seen.update(torch=grads[0]), lambda *_: None),
        pytest.warns(UserWarning, match="no input.* require"),
    ):
        model(torch.ones(2, 3)).backward()
    with hooked("hookline", model, lambda m, *grads: seen.update(hl=grads[0]), lambda *_: None):
        model(torch.ones(2, 3)).backward()
    assert seen["torch"] == (None,)  # of two inputs, one of which has a gradient
    assert seen["hl"][0] is None
    h = model.stem(torch.ones(2, 3))
    torch.testing.assert_close(seen["hl"][1], 4 * h**3)


class Several(nn.Module):
    """A module of several operations."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).tanh() * 2


@pytest.mark.trap(40)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_the_legacy_hooks_grad_input_is_the_last_operations():
    torch.manual_seed(0)
    model, seen, x = nn.Sequential(Several(), nn.Linear(2, 2)), [], torch.ones(4, 3)
    x.requires_grad_()
    handles = [
        module.register_backward_hook(lambda module, grads_in, grads_out: seen.append(grads_in))
        for module in model
    ]
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    of_linear, of_two = seen
    assert [list(grad.shape) for grad in of_linear] == [[2], [4, 2], [2, 2]]  # bias, x, weight.T
    assert of_two[0].shape != x.shape
    with pytest.raises(AttributeError, match=r"not dL/dx.*\n.*line\.backward") as failed:
        with hl.attach(model) as line:
            line.register_backward_hook("0", lambda *_: None)
    assert "ports=('grad_input', 'grad_output')" in str(failed.value)
    expected, x.grad = x.grad, None
    with hl.record(model, "0:grad_input") as run:
        model(x).sum().backward()
    assert torch.equal(run["0:grad_input"], expected)


def test_one_tensor_given_twice_is_one_tensor_with_one_gradient():
    # torch gives the module two, so that self-attention would not know itself; and each its share.
    model, seen = Inside(Two(), lambda m, h: m(h, h)), []
    with hooked("hookline", model, lambda m, grads, _: seen.append(grads), lambda *_: None):
        model(torch.ones(2, 3)).backward()
    expected = []
    with hooked("torch", model, lambda m, grads, _: expected.append(grads), lambda *_: None):
        model(torch.ones(2, 3)).backward()
    assert torch.equal(seen[0][0], seen[0][1])
    assert torch.allclose(seen[0][0], expected[0][0] + expected[0][1])


@pytest.mark.trap(19)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 3), nn.Identity, Two], ids=["layer", "identity", "two"]
)
def test_in_place_behind_a_module_is_right_where_torch_raises(make):
    def call(module, h):
        return module(h, h + 1) if isinstance(module, Two) else (module(h),)

    def in_place(module, h):
        found = call(module, h)
        return (found[0].mul_(3), *found[1:])

    def apart(module, h):
        found = call(module, h)
        return (found[0] * 3, *found[1:])

    def run(by, use):
        torch.manual_seed(0)
        model, seen = Inside(make(), use), []
        with hooked(by, model, lambda m, *grads: seen.extend(grads), lambda *_: None):
            model(torch.ones(2, 3)).backward()
        return seen, [p.grad for p in model.parameters()]

    with pytest.raises(RuntimeError, match="modified inplace"):
        run("torch", in_place)
    assert same(run("hookline", in_place), run("torch", apart))


class Plus(nn.Module):
    def forward(self, x):
        return x * 2 + 1


BLOCKS = {
    "relu": nn.ReLU,
    "arithmetic": Plus,
    "several": lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 3)),
}


@pytest.mark.parametrize("where", ["the root", "inside", "everywhere", "two lines"])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_input_that_is_written_to_behind_the_module_is_right(block, where):
    def run(by):
        torch.manual_seed(0)
        inner, seen = BLOCKS[block](), []
        model = nn.Sequential(inner) if where == "inside" else inner

        def hook(module, grad_input, grad_output):
            seen.append((grad_input, grad_output))

        leaf = torch.ones(2, 3, requires_grad=True)
        x = leaf.clone()
        with ExitStack() as stack:
            if by == "torch":
                stack.callback(inner.register_full_backward_hook(hook).remove)
            else:
                line = stack.enter_context(
                    hl.attach(hl.EVERYWHERE if where == "everywhere" else model)
                )
                line.backward(inner, hook)
            if by == "hookline" and where == "two lines":
                stack.enter_context(hl.attach(model)).backward("", lambda *_: None)
            x += model(x)
            x.sum().backward()
        return seen, leaf.grad

    found = run("hookline")
    assert len(found[0]) == 1
    assert same(found, run("torch"))


def test_a_second_derivative_past_the_outputs_calls_no_hook():
    # torch is silent, too: there is no grad_output that the hook could be given.
    for by in ("torch", "hookline"):
        model, seen = Inside(Square()), []
        x = torch.ones(2, 3, requires_grad=True)

        def note(module, grad_input, grad_output, seen=seen):
            seen.append(grad_output[0].shape)

        with hooked(by, model, note, lambda *_: None):
            (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
            assert len(seen) == 1
            # Straight to the input that Square saved, not through what it returned.
            h = model.stem(x)
            y = model.inner(h).sum()
            (first,) = torch.autograd.grad(y, h, create_graph=True)
            first.sum().backward()
        assert len(seen) == 2
        assert grad.shape == (2, 3)


class Expm1(torch.autograd.Function):
    """exp(x) - 1, which keeps its output for backward, and does not say so."""

    @staticmethod
    def forward(ctx, x):
        y = x.expm1()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (y + 1)


class Custom(nn.Module):
    def forward(self, x):
        return Expm1.apply(x)


@pytest.mark.parametrize(
    "inner",
    [Square(), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)), Custom(), nn.GELU()],
    ids=["square", "tanh", "softmax", "custom", "gelu"],
)
def test_changed_gradients_can_be_differentiated_again_as_torchs(inner):
    found = {}
    for by in ("torch", "hookline"):
        torch.manual_seed(0)
        model, x = Inside(inner), torch.randn(2, 3, requires_grad=True)
        with hooked(by, model, lambda m, gi, go: (gi[0] * 2,), lambda m, go: (go[0] ** 2,)):
            (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
            found[by] = torch.autograd.grad(grad.square().sum(), [x, *model.parameters()])
    assert all(map(torch.allclose, found["hookline"], found["torch"]))
    assert found["torch"][0].any()


class Named(nn.Module):
    """A layer whose result stands in a dict, into which torch's own hooks do not look."""

    def forward(self, x):
        return {"y": x.tanh()}


class InsideNamed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.stem, self.inner = nn.Linear(3, 3), inner

    def forward(self, x):
        y = self.inner(self.stem(x))
        return (y["y"] if isinstance(y, dict) else y).sum(1) ** 2


def test_gradients_in_a_dict_can_be_differentiated_again():
    def squared(module, grad_output):
        return {"y": grad_output["y"] ** 2} if module.kind == "dict" else (grad_output[0] ** 2,)

    found = []
    for inner, kind in ((nn.Tanh(), "lone"), (Named(), "dict")):
        torch.manual_seed(0)
        model, x = InsideNamed(inner), torch.randn(2, 3, requires_grad=True)
        inner.kind = kind
        with hl.attach(model) as line:
            line.backward("inner", lambda m, gi, go: (gi[0] * 2,))
            line.backward_pre("inner", squared)
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), [x, *model.parameters()]))
    assert all(map(torch.allclose, *found))
    assert found[0][0].any()


# -- what is left ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
def test_a_module_that_keeps_its_output_is_freed_after_the_line(kind):
    def one():
        model = nn.Sequential(Keeping(), nn.Tanh())
        with hl.attach(model) as line:
            getattr(line, kind)("0", lambda *_: None)
            model(torch.ones(1, 3, requires_grad=True)).sum().backward()
        return weakref.ref(model[0])

    dead = one()
    gc.collect()  # the module and its output hold each other, hooks or not
    assert dead() is None


def test_gradients_that_nobody_asked_for_are_not_kept():
    """A graph of gradients that its own hooks hold would be held for ever."""

    def one():
        model, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(1, 3, requires_grad=True)
        with hl.attach(model) as line:
            line.options.quiet = True
            line.backward("0", lambda *_: None)
            y = model(x)
            torch.autograd.grad(y.square().sum(), model[0].weight, create_graph=True)
        return weakref.ref(y)

    dead = one()
    gc.collect()
    assert dead() is None


def test_a_model_gone_before_backward_is_still_seen_everywhere():
    seen = []
    with hl.attach(hl.EVERYWHERE) as line:
        line.backward(nn.Linear, lambda module, *_: seen.append(type(module)))
        line.backward_pre(nn.Linear, lambda module, *_: seen.append(type(module)))
        loss = nn.Linear(2, 1)(torch.ones(1, 2, requires_grad=True)).sum()
        loss.backward()
    assert seen == [nn.Linear, nn.Linear]


def test_a_nested_call_whose_pre_hook_fails_leaves_the_outer_on():
    class Recomputation(nn.Module):
        def forward(self, x, depth):
            if depth:
                try:
                    self(x, depth - 1)
                except ValueError:
                    x = x * 2
            return x + 1

    def fail(module, args):
        if args[1] == 0:
            raise ValueError("inner")

    model, seen = Recomputation(), []
    handle = model.register_forward_pre_hook(fail)
    with hl.attach(model) as line:
        line.backward("", lambda module, grad_input, grad_output: seen.append(grad_output))
        model(torch.ones(2, requires_grad=True), 1).sum().backward()
    handle.remove()
    assert [grad.tolist() for (grad,) in seen] == [[1.0, 1.0]]


class OwnWeight(nn.Module):
    """Calls a module with its own parameter, which has other uses."""

    def __init__(self, inner, n_inputs):
        super().__init__()
        self.inner, self.n_inputs = inner, n_inputs
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        found = self.inner(*(self.weight, x)[: self.n_inputs])
        parts = found if isinstance(found, tuple) else (found,)
        return sum(part.square().sum() for part in parts) + 5 * self.weight.sum()


@pytest.mark.parametrize(
    ("inner", "n_inputs", "site"),
    [(Square(), 1, "inner:grad_input"), (Two(), 2, "inner:grad_input.a")],
    ids=["one", "several"],
)
@pytest.mark.parametrize("order", ["raw edit record", "edit raw record", "edit record raw"])
def test_a_parameter_as_input_has_the_gradient_of_that_call(inner, n_inputs, site, order):
    model, x = OwnWeight(inner, n_inputs), torch.randn(2, 3, requires_grad=True)
    begin = {
        "raw": lambda: raw_line(model, "inner"),
        "edit": lambda: hl.edit(model, site, hl.edits.scale(3)),
        "record": lambda: hl.record(model, site),
    }

    def gradients(order):
        model.zero_grad()
        with ExitStack() as stack:
            lines = {name: stack.enter_context(begin[name]()) for name in order.split()}
            model(x).backward()
        return lines["record"][site], model.weight.grad

    expected, of_all_uses = gradients("edit record")
    torch.testing.assert_close(of_all_uses, expected + 5)
    torch.testing.assert_close(gradients(order), (expected, of_all_uses))
    assert not model.weight._backward_hooks


@contextmanager
def raw_line(model, path):
    with hl.attach(model) as line:
        line.backward(path, lambda module, grad_input, grad_output: None)
        yield line


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("path", ["", "1"])
def test_backward_hooks_see_a_gradient_before_edits_of_the_input(path, is_leaf):
    order, inner = [], nn.Linear(2, 2)
    model = nn.Sequential(nn.Identity(), inner) if path else inner
    x = torch.ones(1, 2, requires_grad=True)
    edit = hl.edit(model, f"{path}:grad_input", lambda g: order.append("edit") or g * 2)
    with edit, hl.attach(model) as line:
        for name in ("hook", "prepended"):
            note = lambda *_, name=name: order.append(name)  # noqa: E731
            line.backward(path, note, prepend=name == "prepended")
        model(x if is_leaf else x * 1).sum().backward()
    assert order == ["prepended", "hook", "edit"]
    torch.testing.assert_close(x.grad, 2 * inner.weight.detach().sum(0, keepdim=True))
