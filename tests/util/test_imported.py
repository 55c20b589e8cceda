"""Modules that somebody else has imported."""

from __future__ import annotations

import importlib
import sys

from hookline.util.imported import imported


def test_a_module_is_found_once_its_import_has_ended(tmp_path, monkeypatch):
    (tmp_path / "found_later.py").write_text(
        "from hookline.util.imported import imported\nSEEN = imported(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert imported("found_later") is None
    module = importlib.import_module("found_later")
    assert module.SEEN is None
    assert imported("found_later") is module
    monkeypatch.delitem(sys.modules, "found_later")
