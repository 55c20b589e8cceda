from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl


def tiles(figure):
    return [image.get_array() for image in figure.axes[0].images]


def labels(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_ha() == "left"]


def ranges(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_ha() == "right"]


def test_each_tile_is_a_channel_of_the_sample_under_its_number(net_run, said):
    figure = hl.plots.channels(net_run, "layer1.0.conv", sample=1)
    value = net_run["layer1.0.conv"]
    assert len(tiles(figure)) == 4
    for k, tile in enumerate(tiles(figure)):
        np.testing.assert_array_equal(tile, value[1, k].numpy())
    assert labels(figure) == ["0", "1", "2", "3"]
    low, high = value[1].min(), value[1].max()
    assert said(figure) == (
        "layer1.0.conv (Conv2d) [2, 4, 8, 8] float32, read as NCHW, sample 1 of 2"
        f" 4 channels; {low:.4g} to {high:.4g}"
    )


def test_64_maps_stand_in_8_rows_of_8(recorded):
    figure = hl.plots.channels(recorded(torch.randn(1, 512, 7, 7)), "site")
    boxes = [image.get_extent() for image in figure.axes[0].images]
    assert len({round(box[0], 3) for box in boxes}) == 8
    assert len({round(box[3], 3) for box in boxes}) == 8


def test_signed_maps_are_centred_at_zero_each_on_its_own_scale(recorded):
    value = torch.tensor([[[[-1.0, 2.0]], [[-8.0, 4.0]], [[0.0, 0.0]]]])
    images = hl.plots.channels(recorded(value), "site").axes[0].images
    assert [image.get_clim() for image in images] == [(-2, 2), (-8, 8), (-1, 1)]
    assert {image.get_cmap().name for image in images} == {"blue-orange"}


def test_maps_of_one_sign_are_viridis_from_least_to_greatest(recorded):
    value = torch.tensor([[[[1.0, 2.0]], [[5.0, 9.0]]]])
    images = hl.plots.channels(recorded(value), "site").axes[0].images
    assert [image.get_clim() for image in images] == [(1, 2), (5, 9)]
    assert {image.get_cmap().name for image in images} == {"viridis"}


@pytest.mark.slow
def test_a_map_on_its_own_scale_has_its_range_above_it(recorded, said):
    value = torch.tensor([[[[-1.0, 2.0]], [[-8.25, 4.0]], [[3.0, 3.0]], [[math.nan, math.inf]]]])
    run = recorded(value)
    assert ranges(hl.plots.channels(run, "site")) == ["-1 to 2", "-8.25 to 4", "3"]
    assert ranges(hl.plots.channels(run, "site", shared=True)) == []
    # A smaller tile has room for fewer digits, and a narrow one for none.
    many = torch.tensor([[-1.234e-5, 0.05678]]).expand(1, 64, 2, 2)
    assert ranges(hl.plots.channels(recorded(many), "site", n=16)) == ["-1.23e-05 to 0.0568"] * 16
    assert ranges(hl.plots.channels(recorded(many), "site")) == ["-1.2e-05 to 0.057"] * 64
    assert ranges(hl.plots.channels(recorded(torch.randn(1, 64, 40, 5)), "site")) == []
    halved = torch.tensor([-1.0, 3.0]).repeat(128).expand(1, 1, 256, 256)
    figure = hl.plots.channels(recorded(halved), "site")
    assert ranges(figure) == ["1"]
    assert "each dot the mean of an area; the scales are of these" in said(figure)


def test_a_shared_scale_leaves_one_outlier_out_and_says_so(recorded):
    value = torch.rand(1, 4, 30, 30)
    value[0, 0, 0, 0] = 1000
    figure = hl.plots.channels(recorded(value), "site", shared=True)
    limits = {image.get_clim() for image in figure.axes[0].images}
    assert len(limits) == 1
    assert limits.pop()[1] < 1.01
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()][-1].startswith("≥ ")


@pytest.mark.parametrize(
    ("order", "first"), [("mean", [2, 0, 1]), ("std", [1, 2, 0]), ("max", [1, 2, 0])]
)
def test_channels_are_sorted_the_largest_first(recorded, said, order, first):
    value = torch.tensor([[[[1.0, 1.0]], [[-9.0, 9.0]], [[2.0, 3.0]]]])
    figure = hl.plots.channels(recorded(value), "site", order=order)
    assert [int(label.split()[0]) for label in labels(figure)] == first
    assert f"3 channels, largest {order} first" in said(figure)


def test_channels_are_chosen_by_number(recorded, said):
    value = torch.randn(1, 100, 4, 4)
    figure = hl.plots.channels(recorded(value), "site", order=torch.tensor([7, -1]), n=1)
    assert labels(figure) == ["7", "99"]
    np.testing.assert_array_equal(tiles(figure)[1], value[0, 99].numpy())
    assert f"2 of 100 channels; of all 100: {value.min():.4g} to {value.max():.4g}" in said(figure)


def test_nan_and_infinity_are_masked_named_and_counted(recorded, said):
    value = torch.randn(1, 3, 5, 5)
    value[0, 1, 2, 3], value[0, 1, 0, 0] = math.nan, math.inf
    figure = hl.plots.channels(recorded(value), "site")
    masks = [np.ma.getmaskarray(tile) for tile in tiles(figure)]
    assert [mask.sum() for mask in masks] == [0, 2, 0]
    assert masks[1][2, 3]
    assert labels(figure) == ["0", "1 NaN", "2"]
    assert "2 NaN or infinite" in said(figure)
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert "NaN or infinite" in words


def test_the_colour_of_nan_is_in_neither_map(recorded):
    for scale in (torch.rand(1, 1, 4, 4), torch.randn(1, 1, 4, 4)):
        colours = hl.plots.channels(recorded(scale), "site").axes[0].images[0].get_cmap()
        bad = colours.get_bad()[:3]
        nearest = np.abs(colours(np.linspace(0, 1, 256))[:, :3] - bad).sum(1).min()
        assert nearest > 0.3


def test_constant_maps_are_named(recorded, said):
    figure = hl.plots.channels(recorded(torch.zeros(1, 2, 4, 4)), "site")
    assert labels(figure) == ["0 const", "1 const"]
    assert "all 0" in said(figure)


def test_maps_of_nan_alone_are_drawn(recorded, said):
    figure = hl.plots.channels(recorded(torch.full((1, 2, 4, 4), math.nan)), "site")
    assert "all 32 NaN or infinite" in said(figure)


def test_large_maps_are_reduced_by_area(recorded, said):
    value = torch.randn(1, 1, 256, 512)
    (tile,) = tiles(hl.plots.channels(recorded(value), "site"))
    np.testing.assert_allclose(
        tile, value[0, 0].unfold(0, 4, 4).unfold(1, 4, 4).mean((2, 3)).numpy(), atol=1e-6
    )
    assert "drawn at 64 x 128" in said(hl.plots.channels(recorded(value), "site"))


def test_channels_last_is_told_by_layout_and_hinted_where_likely(recorded, said):
    value = torch.randn(1, 7, 7, 96)
    run = recorded(value)
    assert "if its channels are last, layout='NHWC'" in said(hl.plots.channels(run, "site"))
    figure = hl.plots.channels(run, "site", layout="NHWC", n=2)
    np.testing.assert_array_equal(tiles(figure)[1], value[0, :, :, 1].numpy())
    assert "read as NHWC" in said(figure)
    assert "96 channels" in said(figure)


def test_of_a_volume_the_middle_slice_is_drawn(recorded, said):
    value = torch.randn(1, 2, 9, 4, 5)
    figure = hl.plots.channels(recorded(value), "site")
    np.testing.assert_array_equal(tiles(figure)[1], value[0, 1, 4].numpy())
    assert "slice D = 4 of 9" in said(figure)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(18).reshape(1, 2, 3, 3),
        torch.arange(18).reshape(1, 2, 3, 3) % 2 == 0,
        torch.randn(1, 2, 3, 3).half(),
        torch.randn(1, 2, 3, 3).bfloat16(),
        torch.randn(1, 2, 3, 3).to(torch.float8_e4m3fn),
        torch.randn(1, 2, 3, 3).double(),
    ],
    ids=lambda value: str(value.dtype),
)
def test_every_dtype_is_drawn_as_its_numbers(recorded, said, value):
    figure = hl.plots.channels(recorded(value), "site")
    np.testing.assert_array_equal(tiles(figure)[1], value[0, 1].double().numpy())
    assert str(value.dtype).removeprefix("torch.") in said(figure)


def test_of_complex_numbers_the_magnitude_is_drawn(recorded, said):
    value = torch.randn(1, 1, 3, 3, dtype=torch.complex64).conj()
    figure = hl.plots.channels(recorded(value), "site")
    np.testing.assert_allclose(tiles(figure)[0], value[0, 0].abs().numpy())
    assert "complex64, magnitudes read as NCHW" in said(figure)


def curve(figure, k):
    """The k-th curve, put back on the scale of its numbers up to a factor and an offset."""
    y = -figure.axes[0].lines[k].get_ydata()
    return (y - y.min()) / (y.max() - y.min())


@pytest.mark.parametrize(
    ("kind", "layout", "letters"), [(nn.Identity, None, "NTC"), (nn.Conv1d, None, "NCL"),
                                    (nn.Identity, "NCT", "NCT")],
)  # fmt: skip
def test_sequences_are_curves_with_channels_where_the_module_has(
    recorded, said, kind, layout, letters
):
    value = torch.rand(2, 5, 6) + 1  # no zero line is in the way
    figure = hl.plots.channels(recorded(value, kind=kind), "site", sample=1, layout=layout)
    rows = value[1].T if letters == "NTC" else value[1]
    assert len(figure.axes[0].lines) == len(rows)
    want = rows[2].numpy()
    np.testing.assert_allclose(
        curve(figure, 2), (want - want.min()) / (want.max() - want.min()), atol=1e-5
    )
    assert f"read as {letters}" in said(figure)


def test_a_vector_is_bars(recorded):
    value = torch.randn(3, 10)
    figure = hl.plots.channels(recorded(value), "site", sample=2, order=[4, 0])
    bars = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(bars, value[2, [4, 0]].numpy())
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["4", "0"]


@pytest.mark.parametrize("shape", [(3, 10, 1, 1), (3, 10, 1, 1, 1), (3, 1, 10)])
def test_maps_of_a_single_number_are_bars(recorded, said, shape):
    value = torch.randn(shape)
    figure = hl.plots.channels(recorded(value), "site", sample=2, order=[4, 0])
    bars = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(bars, value[2].flatten()[[4, 0]].numpy())
    assert "each map is a single number" in said(figure)


def test_the_leaf_that_was_taken_is_named(recorded, said):
    run = recorded((torch.arange(3), {"maps": torch.randn(1, 2, 4, 4)}))
    assert said(hl.plots.channels(run, "site")).startswith("site:output[1].maps (Identity)")
    assert said(hl.plots.channels(run, "site:output[1].maps")).startswith("site:output[1].maps")


def test_the_pass_is_named_where_there_are_several(recorded, said):
    run = recorded(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    figure = hl.plots.channels(run.passes[1], "site")
    assert tiles(figure)[0].tolist() == [[1, 1], [1, 1]]
    assert "float32, pass 1" in said(figure)
    with pytest.raises(hl.AmbiguousError, match=r"run.passes\[0\]"):
        hl.plots.channels(run, "site")


def test_it_draws_from_a_folder_and_while_the_line_is_on(recorded, net, image, tmp_path):
    run = recorded(torch.randn(1, 2, 4, 4))
    opened = hl.open(run.save(tmp_path / "run"))
    for ours, theirs in zip(
        tiles(hl.plots.channels(run, "site")),
        tiles(hl.plots.channels(opened, "site")),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    with torch.no_grad(), hl.record(net, "stem") as live:
        net(image)
        assert len(tiles(hl.plots.channels(live, "stem"))) == 4


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.zeros(0, 3, 4, 4), {}, r"site is empty: its shape is \[0, 3, 4, 4\]"),
        (torch.eye(4).to_sparse(), {}, r"sparse_coo tensor.*\nRecord it plain: .*to_dense\(\)"),
        (torch.tensor(3.0), {}, "site is a single number, 3.0"),
        (torch.zeros(1, 2, 3, 3, device="meta"), {}, "site is on the meta device"),
        ("text", {}, "site must hold a tensor that can be drawn"),
        (torch.zeros(2, 3, 4, 4), {"sample": 2}, "sample must be from 0 to 1 for site, got 2"),
        (torch.zeros(2, 3, 4, 4), {"order": [3]}, "must be a number from 0 to 2, got 3"),
        (torch.zeros(2, 3, 4, 4), {"order": "largest"}, "order must be 'index', .*, got 'largest'"),
        (torch.zeros(2, 3, 4, 4), {"order": []}, "order must name at least one channel"),
        (torch.zeros(2, 3, 4, 4), {"n": 0}, "n must be .*, got 0"),
        (torch.zeros(2, 3, 4, 4), {"layout": "NHW"}, "cannot be read as 'NHW'.*\nGive layout="),
        (torch.zeros(2, 1, 3, 4, 4, 4), {}, "site needs a layout: its shape is"),
    ],
)
def test_what_cannot_be_drawn_is_said_with_what_to_do(recorded, value, options, message):
    with pytest.raises(hl.InputError, match=message) as caught:
        hl.plots.channels(recorded(value), "site", **options)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_nested_tensor_is_refused(recorded):
    parts = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(hl.InputError, match="is a nested tensor"):
        hl.plots.channels(recorded(parts), "site")


def test_the_recordings_own_errors_come_through(net, image):
    with torch.no_grad(), hl.record(net) as run:
        net(image)
    with pytest.raises(hl.OverwrittenError, match="copy=True"):
        hl.plots.channels(run, "layer1.0.bn")
    with pytest.raises(hl.NotRecordedError, match="was never selected"):
        hl.plots.channels(run, "layer9")
