from __future__ import annotations

import sys

import pytest

import hookline as hl
from hookline.views.page import write_recording_page
from warm import run_python


@pytest.mark.parametrize("name", ["jinja2", "PIL.Image"])
def test_a_missing_extra_is_named_with_the_way_to_install_it(
    monkeypatch, tmp_path, strange_run, name
):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(hl.HooklineError) as caught:
        write_recording_page(strange_run, tmp_path / "report.html", title="any")
    assert str(caught.value) == (
        'the page needs jinja2 and pillow.\nRun in the folder of hookline: pip install ".[cli]"'
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_importing_the_views_imports_neither():
    code = (
        "import sys, hookline.views;"
        "print([name for name in ('jinja2', 'PIL', 'matplotlib') if name in sys.modules])"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]"
