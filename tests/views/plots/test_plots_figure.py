"""What all figures share: no global state, notebooks, any name, any style."""

from __future__ import annotations

import gc
import io
import pickle
import sys
import weakref

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookline as hl
from hookline.views import plots
from warm import run_python

SCRIPT = "a$b_{x}$ \\frac %"


USE = """
import io, sys, torch, hookline as hl
assert "plots" in dir(hl) and "hookline.views" not in sys.modules
hl.plots
assert "matplotlib" not in sys.modules
model = torch.nn.Conv2d(1, 4, 3)
with hl.record(model) as run:
    model(torch.rand(1, 1, 8, 8))
import matplotlib
before = matplotlib.rcParams.copy()  # dict() of them would choose a backend
hl.plots.channels(run, "(root)").savefig(io.BytesIO())
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.processes
def test_matplotlib_is_imported_on_use_and_pyplot_never():
    done = run_python("-c", USE)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_the_way_to_install_it_is_said(monkeypatch, net_run):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    from importlib import import_module

    import_module("hookline.views.plots.figure_sheet")._figure_class.cache_clear()
    with pytest.raises(hl.HooklineError) as caught:
        plots.channels(net_run, "stem")
    assert str(caught.value) == (
        'plots need matplotlib.\nRun in the folder of hookline: pip install ".[plots]"'
    )


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plot'"):
        hl.plot  # noqa: B018


@pytest.mark.slow
def test_a_figure_shows_itself_in_a_notebook(net_run):
    figure = plots.channels(net_run, "stem")
    picture = Image.open(io.BytesIO(figure._repr_png_()))
    np.testing.assert_allclose(picture.size, figure.get_size_inches() * figure.dpi, atol=1)
    assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 50


def test_a_figure_pickles(net_run):
    figure = plots.channels(net_run, "stem")
    again = pickle.loads(pickle.dumps(figure))
    assert again._repr_png_() == figure._repr_png_()


def test_a_figure_is_freed_with_its_last_reference(net_run):
    figure = plots.channels(net_run, "stem")
    gone = weakref.ref(figure)
    del figure
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_names_are_drawn_as_they_stand(tmp_path, said):
    model = nn.Sequential()
    model.add_module(SCRIPT, nn.Linear(3, 3))
    model.add_module("very_long_name_" * 12, nn.Linear(3, 3))
    with hl.record(model, copy=True) as run:
        model(torch.rand(2, 3))
    assert said(plots.channels(run, SCRIPT)).startswith(f"{SCRIPT} (Linear)")
    for draw in (plots.histograms, plots.statistics, lambda run: plots.compare(run, run)):
        figure = draw(run)
        figure.savefig(tmp_path / "figure.png")  # what is no formula is not read as one
        everything = [t.get_text() for axes in figure.axes for t in axes.get_yticklabels()]
        everything += [axes.get_title(loc="left") for axes in figure.axes]
        assert SCRIPT in everything
        assert any("…" in text for text in everything)


def test_in_a_dark_style_the_text_is_light(net_run):
    with matplotlib.rc_context({"figure.facecolor": "black", "text.color": "white"}):
        figure = plots.channels(net_run, "stem")
        assert figure.get_facecolor()[:3] == (0, 0, 0)
        assert all(text.get_color() == "white" for text in figure.texts)


@pytest.mark.parametrize("name", plots.__all__)
def test_every_figure_is_documented_with_an_example(name):
    text = getattr(plots, name).__doc__
    assert all(part in text for part in (">>> ", "Args:", "Returns:", "Raises:"))
