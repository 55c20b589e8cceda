"""`hookline operations`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from hookline.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["operations", *arguments])


def test_it_prints_the_calls_of_a_module_and_gives_json():
    done = run("demo:digits", "demo", "block1")
    assert done.exit_code == 0, done.output
    assert "block1 (" in done.output
    assert "of torch's functions" in done.output
    plain = json.loads(run("demo:digits", "demo", "", "--json").output)
    assert plain["path"] == ""
    assert all(row["site"].startswith("@") for row in plain["operations"])


def test_a_path_that_is_not_there_is_an_error():
    done = run("demo:digits", "demo", "block9")
    assert done.exit_code == 2
    assert "matches no module" in done.output
