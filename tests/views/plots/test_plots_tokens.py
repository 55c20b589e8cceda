"""Token x feature maps, pictures, and two recordings side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl


def rows(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_a_row_for_each_token_and_a_column_for_each_feature(recorded, said):
    value = torch.randn(2, 5, 12)
    figure = hl.plots.tokens(
        recorded(value), "site", sample=1, texts=["the", " cat", "\n", "", "x"]
    )
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), value[1].numpy())
    assert rows(figure) == ["the", "␣cat", "\\n", "''", "x"]
    assert "5 tokens, 12 features" in said(figure)
    assert figure.axes[0].get_xlabel() == "feature"


@pytest.mark.parametrize(
    ("shape", "layout", "want"),
    [
        ((4, 6), None, lambda t: t),
        ((2, 6, 4), "NCL", lambda t: t[0].T),
        ((2, 6, 3, 5), None, lambda t: t[0].flatten(1).T),
        ((2, 3, 5, 6), "NHWC", lambda t: t[0].flatten(0, 1)),
    ],
)
def test_layouts_of_tokens(recorded, shape, layout, want):
    value = torch.randn(shape)
    figure = hl.plots.tokens(recorded(value), "site", layout=layout)
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), want(value).numpy())


def test_features_are_sorted_and_cut(recorded, said):
    value = torch.tensor([[[0.0, 5.0, 1.0], [0.0, -5.0, 3.0]]])
    figure = hl.plots.tokens(recorded(value), "site", order="std", n=2)
    assert figure.axes[0].images[0].get_array().tolist() == [[5, 1], [-5, 3]]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["1", "2"]
    assert "2 of 3 features, largest std first" in said(figure)


@pytest.mark.slow
def test_large_tables_are_reduced_by_area(recorded, said):
    value = torch.randn(1, 1024, 1600)
    figure = hl.plots.tokens(recorded(value), "site")
    want = value[0].reshape(512, 2, 800, 2).mean((1, 3)).numpy()
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), want, atol=1e-6)
    assert "drawn as 512 x 800" in said(figure)


def test_one_huge_feature_does_not_hide_the_others(recorded):
    value = torch.randn(1, 64, 256)
    value[0, 0, 0] = 1e4
    figure = hl.plots.tokens(recorded(value), "site")
    assert figure.axes[0].images[0].get_clim()[1] < 5


def test_nan_in_tokens_is_masked_and_counted(recorded, said):
    value = torch.randn(1, 3, 4)
    value[0, 1, 2] = math.nan
    figure = hl.plots.tokens(recorded(value), "site")
    assert np.argwhere(
        np.isnan(np.ma.filled(figure.axes[0].images[0].get_array(), np.nan))
    ).tolist() == [[1, 2]]
    assert "1 NaN or infinite" in said(figure)


def test_texts_must_be_as_many_as_tokens(recorded):
    with pytest.raises(
        hl.InputError, match="one text for each of the 3 tokens of site, got 2 texts"
    ):
        hl.plots.tokens(recorded(torch.ones(1, 3, 4)), "site", texts=["a", "b"])
    with pytest.raises(hl.InputError, match="site must have tokens, got a value read as"):
        hl.plots.tokens(recorded(torch.ones(3)), "site")


def test_several_sites_are_columns_with_the_norm_of_each_token(said):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with torch.no_grad(), hl.record(model, "*") as run:
        model(torch.randn(2, 5, 4))
    figure = hl.plots.tokens(run, [str(site) for site in hl.select(model, "*")], sample=1)
    want = torch.stack([run[f"{k}"][1].norm(dim=-1) for k in range(3)], 1)
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), want, rtol=1e-6)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0", "1", "2"]
    assert figure.axes[0].get_xlabel() == "*"
    assert "Norm of each token at *" in said(figure)
    assert "5 tokens, 3 sites" in said(figure)


def test_a_site_with_one_feature_is_that_number():
    model = nn.Sequential(nn.Linear(4, 1), nn.Identity())
    with torch.no_grad(), hl.record(model, ["0", "(root)"]) as run:
        model(torch.randn(1, 5, 4))
    figure = hl.plots.tokens(run, ["0", "(root)"])
    np.testing.assert_allclose(figure.axes[0].images[0].get_array()[:, 0], run["0"][0, :, 0])
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0", "(root)"]


def test_sites_that_are_no_columns_are_refused():
    model = nn.Sequential(nn.Identity(), nn.Flatten(0, 1), nn.Identity())
    with hl.record(model, "*") as run:
        model(torch.randn(2, 5, 4))
    with pytest.raises(hl.InputError, match="equally many tokens, got 5 at 0 and 10 at 1"):
        hl.plots.tokens(run, ["0", "1"])
    with pytest.raises(hl.InputError, match="n and order must be left out for several sites"):
        hl.plots.tokens(run, ["0"], n=3)
    with pytest.raises(hl.InputError, match="at least one site, got none"):
        hl.plots.tokens(run, [])


@pytest.mark.parametrize(("shape", "place"), [((2, 3, 4, 5), (2, 0, 1)), ((2, 4, 5, 1), None)])
def test_pictures_are_stretched_from_least_to_greatest(recorded, said, shape, place):
    value = torch.randn(shape)
    figure = hl.plots.images(recorded(value), "site")
    drawn = figure.axes[0].images[1].get_array()
    one = value[1].permute(1, 2, 0) if place else value[1].expand(4, 5, 3)
    one = one.double().numpy()
    np.testing.assert_allclose(drawn, (one - one.min()) / (one.max() - one.min()), atol=1e-7)
    assert "2 pictures" in said(figure)


def test_what_is_no_picture_is_refused(recorded):
    with pytest.raises(hl.InputError, match=r"must be a batch .* got shape \[1, 7, 4, 5\]"):
        hl.plots.images(recorded(torch.randn(1, 7, 4, 5)), "site")


def test_an_input_not_recorded_is_said_with_how_to_record_it(recorded):
    run = recorded(torch.rand(1, 3, 4, 4))
    for source in (run, run.passes[0]):
        with pytest.raises(hl.NotRecordedError, match="model's input was not recorded") as caught:
            hl.plots.images(source)
        assert 'hl.record(model, "(root)", ports="input")' in str(caught.value)
    with pytest.raises(hl.NotRecordedError, match="'other' was never selected"):
        hl.plots.images(run, "other")
    model = nn.Identity()
    with hl.record(model, "", ports="input") as run:
        model(torch.rand(1, 3, 4, 4))
    assert len(hl.plots.images(run).axes[0].images) == 1


@pytest.fixture
def two(net, image):
    """A network before and after its second block is changed a little."""
    with torch.no_grad():
        with hl.record(net, nn.Conv2d) as before:
            net(image)
        with hl.edit(net, "layer1.1", hl.edits.scale(1.5)), hl.record(net, nn.Conv2d) as after:
            net(image)
    return after, before


def test_the_sites_that_differ_most_are_on_top_the_first_named(two, said):
    after, before = two
    figure = hl.plots.compare(after, before)
    relative = {key: (after[key] - before[key]).norm() / before[key].norm() for key in before}
    order = rows(figure)
    assert order[:2] == sorted(["layer2.0.conv", "layer2.1.conv"], key=lambda k: -relative[k])
    (points,) = figure.axes[0].lines
    np.testing.assert_allclose(points.get_xdata(), [relative[key] for key in order[:2]], rtol=1e-5)
    # A bar on a logarithmic axis would have a length that means nothing.
    assert figure.axes[0].get_xscale() == "log"
    assert not figure.axes[0].patches
    assert [text.get_text().strip() for text in figure.axes[0].texts] == ["equal"] * 3
    assert "2 of 5 sites differ beyond noise, 0 by noise, 3 equal to the last bit" in said(figure)
    assert "first beyond noise: layer2.0.conv (relative" in said(figure)
    assert rows(hl.plots.compare(after, before, order="index")) == list(before)


def test_one_site_is_drawn_in_both_and_as_the_difference(two, said):
    after, before = two
    figure = hl.plots.compare(after, before, "layer2.0.conv", n=2, sample=1)
    a, b = after["layer2.0.conv"][1].double(), before["layer2.0.conv"][1].double()
    chosen = (a - b).abs().sum((1, 2)).argsort(descending=True)[:2]
    for axes, want in zip(figure.axes[:1] + figure.axes[2:4], (a, b, a - b), strict=True):
        for image, k in zip(axes.images, chosen, strict=True):
            np.testing.assert_allclose(image.get_array(), want[k].numpy())
    assert "relative L2 difference" in said(figure)
    assert "equal to the last bit" in said(hl.plots.compare(after, before, "stem"))


def test_sites_in_one_recording_alone_and_other_shapes_are_said(net, image, said):
    with torch.no_grad():
        with hl.record(net, ["stem", "fc"]) as a:
            net(image)
        with hl.record(net, ["stem", "pool"]) as b:
            net(image[:1])
    figure = hl.plots.compare(a, b)
    assert "shapes [2, 4, 8, 8] and [1, 4, 8, 8]" in figure.axes[0].texts[0].get_text()
    assert "1 value only in a: fc; 1 value only in b: pool" in said(figure)
    with pytest.raises(hl.InputError, match="must have one shape in both recordings"):
        hl.plots.compare(a, b, "stem")


def test_recordings_without_a_site_in_common_are_refused(recorded, net_run):
    with pytest.raises(hl.InputError, match="must have names in common"):
        hl.plots.compare(recorded(torch.ones(2)), net_run)
