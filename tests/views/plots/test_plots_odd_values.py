"""Values at the ends of what a number can be, of dtypes that torch cannot read, under any name."""

from __future__ import annotations

import matplotlib.image
import pytest
import torch
from matplotlib.text import Text
from torch import nn

import hookline as hl
from hookline.views import terminal_plots

F64 = torch.float64
EXTREMES = {
    "float32": torch.tensor([1e38, -3e38, 3e38, 0.0]).repeat(2, 3, 8, 2),
    "float64": torch.tensor([1e308, -1.7e308, 1.7e308, 0.0], dtype=F64).repeat(2, 3, 8, 2),
    "large constant": torch.full((2, 3, 8, 8), 1e20),
    "largest constant": torch.full((2, 3, 8, 8), torch.finfo(F64).max, dtype=F64),
    "large integer": torch.full((2, 3, 8, 8), 2**62),
}


# matplotlib's warnings of overflow, and of ends that are one, are errors here, as all are.
@pytest.mark.slow
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize(
    "draw",
    [
        hl.plots.channels,
        lambda run, site: hl.plots.channels(run, site, shared=True),
        hl.plots.tokens,
        hl.plots.images,
        hl.plots.histograms,
        hl.plots.statistics,
        lambda run, site: hl.plots.compare(run, run, site),
    ],
)
def test_numbers_of_any_size_are_drawn_as_numbers(recorded, name, draw, tmp_path):
    figure = draw(recorded(EXTREMES[name]), "site")
    figure.savefig(tmp_path / "figure.png")
    maps = [
        image.get_array()
        for axes in figure.axes
        for image in axes.get_children()
        if isinstance(image, matplotlib.image.AxesImage)
    ]
    assert all(not torch.as_tensor(map_.mask).any() for map_ in maps if hasattr(map_, "mask"))
    assert all(torch.as_tensor(map_.filled(0.0)).isfinite().all() for map_ in maps)


def packed(*shape):
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


class Packed(nn.Module):
    def forward(self, x):
        return packed(2, 3)


@pytest.fixture
def with_packed():
    model = nn.Sequential(nn.Identity(), Packed())
    with hl.record(model, ["0", "1"]) as run:
        model(torch.rand(1, 2, 4, 4))
    return run


def test_one_value_that_torch_cannot_read_is_left_out_and_said(with_packed, said):
    left_out = "1 value without numbers that can be read (1)"
    assert left_out in said(hl.plots.histograms(with_packed))
    assert left_out in said(hl.plots.statistics(with_packed))
    assert "torch cannot read numbers of float4_e2m1fn_x2: 1" in said(
        hl.plots.compare(with_packed, with_packed)
    )
    assert left_out in str(terminal_plots(with_packed).renderables[1])


def test_a_named_value_that_torch_cannot_read_is_refused(with_packed):
    for draw in (hl.plots.channels, hl.plots.histograms, hl.plots.statistics):
        with pytest.raises(hl.InputError, match=r"1 is .*float4.* torch cannot read.\nRecord it"):
            draw(with_packed, "1")


def test_two_recordings_of_nothing_that_can_be_read_say_so(recorded):
    with pytest.raises(hl.InputError, match="must have numbers in common, got site without"):
        hl.plots.compare(recorded(None), recorded(None))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # said once a process
def test_nested_tensors_are_refused_in_a_comparison(recorded):
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    run = recorded(value)
    with pytest.raises(hl.InputError, match=r"nested tensor.*\nRecord it plain"):
        hl.plots.compare(run, run, "site")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([3 + 4j]), "[1] mean magnitude 5, zeros 0 %"),
        (torch.zeros(0, 20), "[0, 20], no elements"),
    ],
)
def test_a_histogram_says_of_which_numbers_it_is(recorded, value, words):
    axes = hl.plots.histograms(recorded(value), "site").axes[0]
    assert words in [text.get_text() for text in axes.texts]


def test_a_difference_that_squares_do_not_hold_is_drawn(recorded, said):
    a, b = (torch.tensor([number], dtype=F64) for number in (1e-300, 2e-300))
    assert "1 of 1 site differ beyond noise" in said(hl.plots.compare(recorded(a), recorded(b)))


@pytest.mark.slow
def test_names_that_cannot_be_printed_are_escaped(tmp_path, said):
    name = "a\nb\u202e\ud800"
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    with hl.record(model, name, ports=("output", "grad")) as run:
        model(torch.ones(3, 2)).sum().backward()
    (site,) = [site for site in run.sites if site.port == "output"]
    seen = "a\\nb\\u202e\\ud800"
    assert seen in said(hl.plots.channels(run, site))
    for draw in (hl.plots.statistics, hl.plots.gradients):
        figure = draw(run)
        assert seen in figure.axes[0].get_yticklabels()[0].get_text()
        figure.savefig(tmp_path / "figure.png")
    hl.plots.histograms(run).savefig(tmp_path / "figure.png")


def test_a_reduced_tables_colours_are_those_of_what_is_drawn(recorded):
    torch.manual_seed(0)
    figure = hl.plots.tokens(recorded(torch.randn(1, 100_000, 4)), "site")
    (image,) = figure.axes[0].images
    _, high = image.get_clim()
    assert float(abs(image.get_array()).max()) > 0.5 * high
    ticks = figure.axes[0].get_xticks()
    assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_finite_masks_are_no_nan_in_a_reduced_map(recorded, said, dtype):
    mask = torch.full((1, 1, 300, 300), torch.finfo(dtype).min, dtype=dtype).triu(1)
    figure = hl.plots.channels(recorded(mask), "site")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts[0] == "0"
    assert "NaN or infinite" not in texts
    if dtype is torch.float32:
        assert "-3.403e+38 to 0" in said(hl.plots.attention(recorded(mask), "site"))


def test_labels_and_masks_are_of_a_map_before_it_is_reduced(recorded, said):
    board = torch.arange(600)[:, None].add(torch.arange(600)).remainder(2.0)[None, None]
    figure = hl.plots.channels(recorded(board), "site")
    assert figure.axes[0].texts[0].get_text() == "0"  # and not "0 const", as all its means are 0.5
    scores = torch.zeros(1, 1, 600, 600).masked_fill(board > 0, -torch.inf)
    assert "180,000 masked" in said(hl.plots.attention(recorded(scores), "site"))


def test_complex_numbers_are_subtracted_before_their_magnitude(recorded):
    value = torch.tensor([[3 + 4j, 1j]])
    figure = hl.plots.compare(recorded(value), recorded(value * 1j), "site")
    gap = next(axes for axes in figure.axes if axes.get_title("left") == "|first - second|")
    drawn = gap.images[0].get_array().flatten().tolist()
    assert drawn == pytest.approx([5 * 2**0.5, 2**0.5])


@pytest.mark.slow
def test_gradients_of_many_sites_are_a_few_lines():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    with hl.record(model, ports="grad") as run:
        model(torch.ones(3, 2)).sum().backward()
    figure = hl.plots.gradients(run)
    assert sum(len(axes.lines) + len(axes.collections) for axes in figure.axes) < 20


def pair(second):
    return torch.ones(3, 4), torch.full((2,), second)


@pytest.mark.slow
def test_statistics_and_histograms_have_each_leaf(recorded, said):
    nan = float("nan")
    one, two = recorded(pair(nan)), recorded(pair(1.0), pair(nan))
    for draw in (hl.plots.statistics, hl.plots.histograms):
        assert "1 with NaN or infinite elements" in said(draw(one)) or draw is hl.plots.histograms
        texts = " ".join(text.get_text() for text in draw(one).findobj(Text))
        assert "site:output[0]" in texts
        assert "site:output[1]" in texts
    assert "NaN or infinite elements in pass 1 at site:output[1] first" in said(
        hl.plots.statistics(two)
    )
    assert "at site:output[1] first" in said(hl.plots.statistics(two, "site"))


def test_a_comparison_has_each_leaf(recorded):
    figure = hl.plots.compare(recorded(pair(1.0)), recorded(pair(2.0)), order="index")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["site:output[0]", "site:output[1]"]
    (points,) = figure.axes[0].lines
    assert list(points.get_xdata()) == [0.5]
