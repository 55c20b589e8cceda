"""Histograms, statistics and gradients: the numbers that are drawn are the recording's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.statistics import flat_numbers


def rows(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def named(figure, heading):
    return next(axes for axes in figure.axes if axes.get_xlabel() == heading)


def test_the_bars_are_numpys_histogram(net_run):
    figure = hl.plots.histograms(net_run, bins=20)
    for key, axes in zip(net_run, figure.axes, strict=True):
        counts, edges = np.histogram(net_run[key].double().numpy(), 20)
        drawn = axes.patches[0].get_data()
        np.testing.assert_array_equal(drawn.values, counts)
        np.testing.assert_array_equal(drawn.edges, edges)
        assert axes.get_title(loc="left") == key
        assert axes.get_yscale() == "log"


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool, torch.float64])
def test_the_bars_of_any_dtype_are_numpys_histogram(recorded, dtype):
    value = (torch.randn(1000) * 3).to(dtype)
    axes = hl.plots.histograms(recorded(value), "site", log=False).axes[0]
    counts, edges = np.histogram(value.double().numpy(), 64)
    np.testing.assert_array_equal(axes.patches[0].get_data().values, counts)
    np.testing.assert_array_equal(axes.patches[0].get_data().edges, edges)
    assert axes.get_yscale() == "linear"


def test_large_tensors_are_counted_in_pieces(recorded, monkeypatch):
    value = torch.randn(30, 50)
    monkeypatch.setattr(flat_numbers, "CHUNK_NUMEL", 70)
    axes = hl.plots.histograms(recorded(value), "site").axes[0]
    counts, _ = np.histogram(value.double().numpy(), 64)
    np.testing.assert_array_equal(axes.patches[0].get_data().values, counts)


def test_nan_and_infinity_are_left_out_of_the_bars_and_counted(recorded):
    value = torch.tensor([1.0, math.nan, 3.0, -math.inf, 2.0])
    axes = hl.plots.histograms(recorded(value), "site").axes[0]
    assert axes.patches[0].get_data().values.sum() == 3
    assert "2 NaN or infinite" in axes.texts[0].get_text()


@pytest.mark.parametrize("value", [torch.full((3,), math.nan), torch.zeros(0), torch.ones(5)])
def test_histograms_of_nothing_and_of_one_number_are_drawn(recorded, value, tmp_path):
    figure = hl.plots.histograms(recorded(value), "site")
    figure.savefig(tmp_path / "histogram.png")
    drawn = figure.axes[0].patches[0].get_data().values
    assert drawn.sum() == value.isfinite().sum()


def test_of_many_sites_some_are_drawn_evenly_and_it_is_said(said):
    model = nn.Sequential(*[nn.Identity() for _ in range(101)])
    with hl.record(model, "*") as run:
        model(torch.rand(4))
    figure = hl.plots.histograms(run, n=5)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["0", "25", "50", "75", "100"]
    assert "5 of 101 sites" in said(figure)


def test_what_was_overwritten_is_left_out_of_the_whole_and_said(net, image, said):
    with torch.no_grad(), hl.record(net, "layer1.0.*") as run:
        net(image)
    for figure in (hl.plots.histograms(run), hl.plots.statistics(run)):
        assert "not drawn: 1 value overwritten in place" in said(figure)
        assert "(layer1.0.bn)" in said(figure)
    with pytest.raises(hl.OverwrittenError):
        hl.plots.histograms(run, ["layer1.0.bn"])


def test_statistics_over_depth_are_rows_in_the_order_of_firing(net_run, said):
    figure = hl.plots.statistics(net_run, what=("mean", "std", "zeros"))
    order = net_run.passes[0].order
    assert rows(figure) == order
    values = [net_run[key].double() for key in order]
    drawn = named(figure, "mean").lines[0].get_xdata()
    np.testing.assert_allclose(drawn, [value.mean() for value in values])
    drawn = named(figure, "standard deviation").lines[0].get_xdata()
    np.testing.assert_allclose(drawn, [value.std(correction=0) for value in values])
    drawn = named(figure, "zeros, %").lines[0].get_xdata()
    np.testing.assert_allclose(drawn, [100 * (value == 0).double().mean() for value in values])
    assert "5 values, as they fired" in said(figure)


def test_sites_with_nan_are_marked_in_statistics(said):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.record(model, "*", copy=True) as run:
        model(torch.tensor([1.0, math.nan, 3.0]))
    figure = hl.plots.statistics(run, what="mean")
    assert "2 with NaN or infinite elements" in said(figure)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [2, 2]
    assert figure.axes[0].lines[1].get_ydata().tolist() == [0, 1]


def test_each_call_has_its_row(looped):
    with torch.no_grad(), hl.record(looped, "block") as run:
        looped(torch.ones(1, 2))
    assert rows(hl.plots.statistics(run)) == ["block#0", "block#1", "block#2"]


def test_numbers_of_very_different_size_get_a_log_axis(recorded):
    model = nn.Sequential(*[nn.Identity() for _ in range(9)])
    with hl.edit(model, "8", hl.edits.scale(1e6)), hl.record(model, "*", copy=True) as run:
        model(torch.rand(5))
    axes = hl.plots.statistics(run, what="max").axes[0]
    assert axes.get_xscale() == "symlog"
    assert axes.get_xlabel() == "greatest (log)"


@pytest.mark.parametrize("sizes", [(1, 1, 1e300), (1e-300, 1e-300, 1e300), (1, 1, -1e5)])
def test_names_of_ticks_do_not_overlap_on_a_log_axis(sizes):
    model = nn.ModuleList([nn.Identity() for _ in sizes])
    with hl.record(model, "*") as run:
        for module, size in zip(model, sizes, strict=True):
            module(torch.tensor([size], dtype=torch.float64))
    figure = hl.plots.statistics(run)
    figure.canvas.draw()
    (axes,) = figure.axes
    texts = [text for text in axes.get_xticklabels() if text.get_text()]
    boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.x0)
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    low, high = axes.get_xlim()
    assert low < min(0, *sizes) <= max(0, *sizes) < high


def test_few_sites_over_passes_are_curves(recorded, said):
    run = recorded(*[torch.full((4,), float(k)) for k in range(5)])
    figure = hl.plots.statistics(run, what=("mean", "max"))
    assert said(figure) == "Statistics over passes 5 passes; 1 site"
    assert [axes.get_ylabel() for axes in figure.axes] == ["mean", "greatest"]
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0, 1, 2, 3, 4]
    assert figure.axes[1].get_xlabel() == "pass"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["site"]


def test_many_sites_over_passes_are_rows_of_colours():
    model = nn.Sequential(*[nn.Identity() for _ in range(8)])
    with hl.record(model, "*", copy=True) as run:
        for k in range(3):
            model(torch.full((2,), float(k)))
    figure = hl.plots.statistics(run, what="mean")
    assert rows(figure) == [str(k) for k in range(8)]
    assert figure.axes[0].images[0].get_array().tolist() == [[0, 1, 2]] * 8


def test_single_numbers_are_drawn_once(net, image, said):
    with torch.no_grad(), hl.record(net, nn.Conv2d, keep=lambda t: t.mean()) as run:
        for k in range(3):
            net(image * k)
    figure = hl.plots.statistics(run, "stem")
    assert [axes.get_ylabel() for axes in figure.axes] == ["value"]
    want = [one["stem"].item() for one in run.passes]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), want)
    assert said(figure).endswith("3 passes; 1 site, each value a single number")
    figure = hl.plots.statistics(run.passes[2], what=("min", "std", "non_finite"))
    assert [axes.get_xlabel() for axes in figure.axes] == ["value", "NaN or infinite, count"]
    np.testing.assert_allclose(
        figure.axes[0].lines[0].get_xdata(), [value.item() for value in run.passes[2].values()]
    )
    assert "5 values, each value a single number, as they fired" in said(figure)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "named", "words"), [(90, 90, None), (150, 75, "second"), (200, 67, "third")]
)
def test_where_not_every_row_is_named_it_is_said(said, n, named, words):
    model = nn.Sequential(*[nn.Identity() for _ in range(n)])
    with hl.record(model, "*", copy=True) as run:
        model(torch.ones(2))
    figure = hl.plots.statistics(run, what="mean")
    assert len(rows(figure)) == named
    if words is None:
        assert said(figure).endswith("the first at the top")
    else:
        assert said(figure).endswith(f"every {words} row is named, at the marks")


def test_a_site_that_fires_in_some_passes_leaves_its_place_empty():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.rare = nn.Identity()

        def forward(self, x, use):
            return self.rare(x) if use else x

    model = Sometimes()
    with hl.record(model) as run:
        for use in (True, False, True):
            model(torch.ones(2), use)
    drawn = hl.plots.statistics(run, "rare", what="mean").axes[0].lines[0].get_ydata()
    np.testing.assert_array_equal(drawn, [1, np.nan, 1])


def test_the_first_pass_with_nan_is_named(recorded, said):
    values = [torch.ones(2), torch.ones(2), torch.tensor([math.nan, 1.0])]
    figure = hl.plots.statistics(recorded(*values))
    assert "NaN or infinite elements in pass 2 at site first" in said(figure)


def test_of_very_many_passes_some_are_drawn_and_it_is_said(recorded, said, monkeypatch):
    from importlib import import_module

    monkeypatch.setattr(import_module("hookline.views.plots.statistics"), "MOST_PASSES", 3)
    # The function has the module's name; the module is where it is defined.
    figure = hl.plots.statistics(recorded(*[torch.full((2,), float(k)) for k in range(9)]))
    assert "3 of 9 passes, evenly spaced" in said(figure)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 4, 8]


def test_gradients_are_the_tables_with_dead_and_exploding_marked(said):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        net[0].bias.fill_(-1000.0)
    net[2].weight.requires_grad_(False)
    with hl.record(net, ports="grad") as run:
        (net(torch.rand(3, 4)) * 1e6).sum().backward()
    figure = hl.plots.gradients(run)
    flow = run.gradients()
    assert rows(figure) == [row.site for row in flow]
    assert "1 site exploding (▲); 2 sites dead (✕); 1 site without a gradient" in said(figure)
    norms = named(figure, "L2 norm")
    assert norms.get_xscale() == "log"
    drawn = {line.get_marker(): line for line in norms.lines if line.get_marker() != "None"}
    assert drawn["^"].get_xdata() == [flow["2.bias:grad"].norm]
    words = [text.get_text() for text in norms.texts]
    assert words == ["0, dead", "0, dead", "no gradient"]


def test_a_share_of_zeros_is_a_point_also_where_it_is_0():
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 2))
    net[0].bias.requires_grad_(False)
    x = torch.rand(3, 20) + 1
    x[:, 0] = 0  # of 400 weights 20 get no gradient
    with hl.record(net, ports="grad") as run:
        net(x).sum().backward()
    zeros = named(hl.plots.gradients(run), "zeros, %")
    points = [line for line in zeros.lines if line.get_marker() != "None"]
    drawn = sorted((pair for line in points for pair in line.get_xydata()), key=lambda one: one[1])
    np.testing.assert_allclose(drawn, [[5, 0], [math.nan, 1], [0, 2], [0, 3]])


def test_how_many_gradients_a_mean_is_of_is_said(said):
    net = nn.Linear(2, 1)
    with hl.record(net, ports="grad") as run:
        net(torch.ones(3, 2)).sum().backward()
        assert "at the top; one gradient each" in said(hl.plots.gradients(run))
        net(torch.ones(3, 2)).sum().backward()
        assert "at the top; means over 2 gradients each" in said(hl.plots.gradients(run))
        net.bias.requires_grad_(False)
        net(torch.ones(3, 2)).sum().backward()
    assert "at the top; means over up to 3 gradients each" in said(hl.plots.gradients(run))


def test_gradients_that_were_not_recorded_are_asked_for(net_run):
    with pytest.raises(hl.NotRecordedError, match="ports='grad'"):
        hl.plots.gradients(net_run)


def test_gradients_of_several_backward_passes_have_a_row_each():
    net = nn.Linear(2, 1)
    with hl.record(net, ports="grad_output") as run:
        loss = net(torch.ones(3, 2)).square().sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    figure = hl.plots.statistics(run, what="mean")
    assert rows(figure) == ["(root):grad_output, backward 0", "(root):grad_output, backward 1"]
    first, second = figure.axes[0].lines[0].get_xdata()
    assert second == pytest.approx(2 * first)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda run: hl.plots.statistics(run, what="median"),
            "what must be some of mean, .*, got 'median'",
        ),
        (lambda run: hl.plots.statistics(run, what=()), "what must be some of mean, .*, got none"),
        (
            lambda run: hl.plots.histograms(run, bins=0),
            "bins must be a whole number from 1 up, got 0",
        ),
        (lambda run: hl.plots.histograms(run, "site"), "'site' has a value in each of 2 passes"),
        (hl.plots.histograms, r"got 2.\nGive one of them: run.passes\[0\]"),
        (lambda run: hl.plots.statistics(run, "other"), "'other' was never selected"),
    ],
)
def test_what_cannot_be_drawn_is_said(recorded, draw, message):
    with pytest.raises(hl.HooklineError, match=message):
        draw(recorded(torch.ones(2), torch.ones(2)))


def test_a_model_that_did_not_run_has_nothing_to_draw():
    with (
        pytest.warns(hl.HooklineWarning, match="saw nothing"),
        hl.record(nn.Linear(1, 1)) as run,
        pytest.raises(hl.NotRecordedError, match="the model has not run"),
    ):
        hl.plots.histograms(run)


def test_the_line_joins_repeated_blocks_in_firing_order():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).tanh()

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)  # registered first, fires last
            self.h = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.h:
                x = block(x)
            return self.head(x)

    with hl.record(model := Late(), ports=("output", "grad_output")) as run:
        model(torch.rand(3, 4)).sum().backward()
    axes = hl.plots.statistics(run, what="mean").axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    trunk = axes.lines[1].get_ydata().tolist()
    assert [labels[place] for place in trunk] == ["h.0", "h.1", "h.2"]
    axes = hl.plots.gradients(run).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels[-2:] == ["head:grad_output", "(root):grad_output"]
    assert labels[0] == "h.0.fc:grad_output"
    trunk = axes.lines[0].get_ydata().tolist()
    assert [labels[int(place)] for place in trunk] == [f"h.{k}:grad_output" for k in range(3)]
