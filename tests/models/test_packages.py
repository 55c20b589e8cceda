from __future__ import annotations

import sys
import time

import pytest

from hookline.data import load_input
from hookline.errors import InputError, ModelError
from hookline.models import load_model
from hookline.models.packages import error_in_short, import_package, is_reachable
from warm import DYNAMO, run_python


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("torchvision", "torchvision:resnet18", "vision"),
        ("timm", "timm:resnet18", "vision"),
        ("transformers", "hf:openai-community/gpt2", "text"),
    ],
)
def test_a_missing_package_is_an_error_with_the_extra_to_install(
    monkeypatch, said, package, name, extra
):
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to forbid an import
    with pytest.raises(ModelError) as raised:
        load_model(name)
    assert said(raised) == (
        f"{name} needs the package {package}, which is not installed.\n"
        f'Run in the folder of hookline: pip install ".[{extra}]"'
    )


def test_without_pillow_a_picture_is_an_input_error(monkeypatch, said, picture, digits):
    for module in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match="needs the package pillow") as raised:
        load_input(str(picture), digits)
    assert 'pip install ".[vision]"' in said(raised)


def test_a_package_whose_own_import_fails_is_said_to_be_broken(monkeypatch, said, tmp_path):
    (tmp_path / "timm.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ModelError, match="installed but cannot be imported") as raised:
        import_package("timm", "timm:resnet18")
    assert "a_package_that_is_not_there" in said(raised)


def test_a_server_that_nobody_answers_for_is_not_reachable():
    started = time.monotonic()
    assert not is_reachable("http://127.0.0.1:9")
    assert not is_reachable("https://huggingface.co")
    assert time.monotonic() - started < 5


def test_an_error_is_said_in_its_first_sentence():
    assert error_in_short(ValueError("one. Two.\nthree")) == "ValueError: one"
    assert error_in_short(EOFError()) == "EOFError"
    assert len(error_in_short(ValueError("word " * 1000))) < 200


def printed_by(code: str) -> str:
    result = run_python("-W", "error", "-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.processes
def test_importing_models_imports_no_extra():
    code = (
        "import sys, hookline.models\n"
        "heavy = {'torchvision', 'timm', 'transformers', 'PIL', 'sklearn', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert printed_by(code) == "[]"


@pytest.mark.processes
def test_without_a_network_the_hub_is_given_up_on_at_once():
    # The libraries themselves would try for half a minute for each file.
    code = (
        "import os, time\n"
        "os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "from hookline.models import load_model\n"
        "from hookline.models.packages import import_package\n"
        "import_package('transformers', ''), import_package('timm', '')\n"
        "for name in ('hf:hookline/never-there', 'timm:resnet18'):\n"
        "    started = time.monotonic()\n"
        "    try:\n        load_model(name)\n"
        "    except ValueError as error:\n        print(error)\n"
        "    assert time.monotonic() - started < 8\n"
    )
    result = run_python("-c", code, of=DYNAMO)
    assert result.returncode == 0, result.stderr
    assert "hf:hookline/never-there: a folder of that name does not exist, the hub" in result.stdout
    assert "timm:resnet18: its weights cannot be fetched (no connection" in result.stdout
