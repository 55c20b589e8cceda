"""watch: what it prints."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from float32_device import Float32Device
from hookline.verbs.watch.watch import _blocks_text, _mean_and_std
from second_thread import Meanwhile


def watched(model, *args, **options):
    out = io.StringIO()
    with hl.watch(model, file=out, **options):
        model(*args)
    return out.getvalue().splitlines()


def test_each_call_is_a_line_with_shapes_statistics_and_time(looped):
    lines = watched(looped, torch.ones(1, 2))
    assert len(lines) == 5
    value = looped.block(torch.ones(1, 2))
    pattern = (
        r"  block +Linear +\[1, 2\] -> \[1, 2\] float32  mean (\S+)  std (\S+)  ~?(\d+\.\d{3}) ms"
    )
    mean, std, _ = re.fullmatch(pattern, lines[0]).groups()
    assert float(mean) == pytest.approx(value.mean().item(), rel=1e-3)
    assert float(std) == pytest.approx(value.std(correction=0).item(), rel=1e-3)
    assert lines[-1].startswith("(root) ")


def test_the_indentation_is_the_depth_of_the_call(net, image):
    depth = {line.split()[0]: len(line) - len(line.lstrip()) for line in watched(net, image)}
    assert depth["(root)"] == 0
    assert depth["layer1"] == 2
    assert depth["layer1.0"] == 4
    assert depth["layer1.0.conv"] == 6


def test_a_name_is_a_line_and_moves_no_cursor():
    name, out = "a\x1b[2J\u202e\nb", io.StringIO()
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    with hl.watch(model, "*", file=out):
        model(torch.ones(1, 2))
    assert out.getvalue().startswith(r"a\x1b[2J\u202e\nb")
    assert out.getvalue().count("\n") == 1


def test_a_module_that_raises_is_named_with_what_it_got(net, capsys):
    with pytest.raises(RuntimeError), hl.watch(net):
        net(torch.zeros(1, 7, 8, 8))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("!! stem (Conv2d), which got Tensor[1, 7, 8, 8], raised RuntimeError: ")


def test_odd_values_do_not_stop_it(holder):
    lines = watched(holder, torch.ones(2))
    assert "dict(x=Tensor[2], rest=tuple(Tensor[2]), scale=2.0, mask=Tensor[2])" in lines[0]
    model = nn.Sequential(nn.Identity())
    assert "[0]" in watched(model, torch.zeros(0))[0]
    assert "[3]" in watched(model, torch.arange(3))[0]
    assert "mean nan" in watched(model, torch.tensor([float("nan")]))[0]
    assert "[2]" in watched(model, torch.zeros(2, device="meta"))[0]
    assert (
        watched(model, torch.full((4,), 60000.0, dtype=torch.float16))[0].count("mean 6e+04") == 1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (300, 7), (3, 65536), (65537,)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_mean_and_deviation_are_those_of_float64(shape, dtype, scale):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = ((x + 1000) * scale).to(dtype).t() if len(shape) == 2 else ((x + 3) * scale).to(dtype)
    (line, _) = watched(nn.Sequential(nn.Identity()), x)
    mean, std = re.search(r"mean (\S+)  std (\S+)", line).groups()
    expected = x.double()
    wanted = pytest.approx(expected.mean().item(), rel=1e-3, abs=0, nan_ok=True)
    assert float(mean) == wanted
    wanted = pytest.approx(expected.std(correction=0).item(), rel=1e-3, abs=0, nan_ok=True)
    assert float(std) == wanted


class OnDevice(torch.Tensor):
    """A tensor of a device that computes a deviation in float32."""

    device = SimpleNamespace(type="cuda")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.std_mean:
            return (args[0].as_subclass(torch.Tensor) ** 2).mean().sqrt(), result[1]
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else result


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_that_float32_lacks_are_those_of_float64(scale):
    value = torch.tensor([-1.0, 1.0]) * scale
    mean, std = _mean_and_std(value.as_subclass(OnDevice))
    assert (mean, std) == (0, pytest.approx(scale, rel=1e-6, abs=0))


def test_a_constant_has_no_deviation():
    (line, _) = watched(nn.Sequential(nn.Identity()), torch.full((100_000,), 1000.1))
    assert "mean 1000  std 0  " in line


def test_a_selection_can_be_watched_and_the_line_removed(net, image, capsys, left_as_found):
    before = left_as_found(net)
    line = hl.watch(net, "layer1.*")
    net(image)
    line.remove()
    net(image)
    assert [text.split()[0] for text in capsys.readouterr().out.splitlines()] == [
        "layer1.0",
        "layer1.1",
    ]
    assert left_as_found(net) == before


def test_edits_are_seen(net, image):
    out = io.StringIO()
    with hl.watch(net, "fc", file=out), hl.edit(net, "fc", hl.edits.scale(0)):
        net(image)
    assert "mean 0  std 0" in out.getvalue()


def backward_lines(model, x, *args, **options):
    out = io.StringIO()
    with hl.watch(model, *args, file=out, **options):
        model(x).sum().backward()
    return out.getvalue().splitlines()


def test_backward_is_shown_in_order_each_gradient_as_it_arrives(net, image):
    lines = backward_lines(net, image)
    back = [line.split()[1] for line in lines if line.startswith("<")]
    assert back[:3] == ["(root)", "fc", "pool"]
    assert back[-1] == "stem"
    assert len(back) == len(lines) / 2 == 22
    (fc,) = [line for line in lines if line.startswith("< fc ")]
    assert re.search(r"Linear +grad_output \[2, 5\] float32  mean 1  std 0$", fc)


def test_a_forward_alone_is_watched_without_mention_of_backward(net, image):
    assert not any(line.startswith("<") for line in watched(net, image))
    out = io.StringIO()
    with hl.watch(net, ["fc"], file=out):
        net(image)


def test_ports_choose_what_is_printed(net, image):
    lines = backward_lines(net, image, "fc", ports=("grad", "grad_input"))
    shown = [line.split()[1:4] for line in lines]
    assert sorted(shown) == [  # autograd is free to choose their order
        ["fc", "Linear", "grad_input"], ["fc.bias", "Linear.bias", "grad"],
        ["fc.weight", "Linear.weight", "grad"],
    ]  # fmt: skip


def test_asked_for_gradients_that_do_not_come_are_warned_of(net, image):
    with pytest.warns(hl.HooklineWarning, match="no gradient flowed back"):
        with hl.watch(net, "fc", ports="grad_output", file=io.StringIO()):
            net(image)


class SlowFile:
    """A file to which another thread prints after the first write."""

    def __init__(self):
        self.text, self.meanwhile = "", None

    def write(self, text):
        self.text += text
        self.meanwhile()


def test_lines_that_two_threads_print_at_once_are_whole():
    model, out = nn.Linear(2, 2), SlowFile()
    out.meanwhile = Meanwhile(lambda: model(torch.ones(1, 2)))
    with hl.watch(model, file=out, every_thread=True):
        model(torch.ones(1, 2))
        out.meanwhile.end()
    lines = out.text.splitlines()
    assert [one.count("Linear") for one in lines] == [1, 1]


def test_nan_in_another_tensor_of_a_value_is_said(capsys):
    model = nn.Identity()
    with hl.watch(model, ports="output"):
        model((torch.ones(2), {"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(1)}))
        model((torch.ones(2), torch.zeros(1)))
    first, second = capsys.readouterr().out.splitlines()
    assert "mean 1  std 0  NaN or inf in [1].a" in first
    assert "NaN" not in second


def test_a_pattern_has_numbers_on_a_device_without_float64():
    class Blocks(list):
        shape, dtype = torch.Size((2, 2)), torch.float32

    blocks = Blocks([torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 3.0]])])
    with Float32Device():
        text = _blocks_text(blocks)
    assert text.endswith("float32  mean 1.5  std 1.118")
