"""Importing hookline changes nothing in torch, and brings none of the extras."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

import hookline as hl
from warm import run_python

pytestmark = pytest.mark.processes

EXTRAS = [
    "typer", "PIL", "jinja2.environment", "starlette", "uvicorn", "torchvision", "timm",
    "transformers", "sklearn", "matplotlib", "torch._dynamo", "torch._inductor", "fsspec",
    "pyarrow", "datasets", "zarr", "lance",
]  # fmt: skip

CHECK = """
    import sys, torch
    from torch import nn
    def state():
        tables = nn.modules.module
        return (
            {name: value for name, value in vars(nn.Module).items()},
            {name: list(t) for name, t in vars(tables).items()
             if name.startswith("_global_") and isinstance(t, dict)},
            {name: value for name, value in vars(torch.Tensor).items()},
            sys.excepthook, torch.get_rng_state().tolist(), torch.is_grad_enabled(),
        )
    before, modules = state(), set(sys.modules)
    IMPORT
    assert state() == before, "torch was changed"
    brought = [name for name in EXTRAS if name in set(sys.modules) - modules]
    assert not brought, brought
"""


def check(statement: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(CHECK).replace("IMPORT", statement).replace("EXTRAS", repr(EXTRAS))
    return run_python("-c", script)


def test_importing_hookline_changes_nothing_and_brings_no_extra():
    done = check("import hookline")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import hookline, typer",
        "import hookline, torch._dynamo",
        "nn.Module.extra = 1",
        "torch.rand(1)",
        "nn.modules.module.register_module_forward_hook(lambda *a: None)",
        "torch.Tensor.backward = None",
    ],
)
def test_the_check_can_fail(statement):
    assert check(statement).returncode == 1


def test_views_and_models_bring_no_extra_until_used():
    done = check(
        "import hookline.views\nfrom hookline.data import *\nfrom hookline.models import *"
    )
    assert done.returncode == 0, done.stderr


DRAWS = """
    import random, sys, torch
    from torch import nn
    random.seed(3)
    before = random.getstate()
    import hookline as hl
    USE
    assert "rich.console" in sys.modules, "rich was not imported"
    assert random.getstate() == before, "a random number was drawn"
"""


@pytest.mark.parametrize(
    "use",
    [
        "hl.extract(nn.Linear(2, 2), torch.ones(4, 2), [''], sys.argv[1], progress=False)",
        "hl.write_page",
    ],
)
def test_the_import_of_rich_draws_no_random_number(use, tmp_path):
    code = textwrap.dedent(DRAWS).replace("USE", use)
    done = run_python("-c", code, tmp_path / "features")
    assert done.returncode == 0, done.stderr


FROM_ZIP = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import hookline as hl
    from hookline.models import load_demo_digits, load_model
    assert hl.__file__.startswith(sys.argv[1]), hl.__file__
    model, (x, labels) = load_model("demo:digits").model, load_demo_digits()
    with hl.record(model, "block*") as run:
        assert model(x).argmax(1).equal(labels)
    hl.write_page(run, sys.argv[2])
"""


def test_the_package_works_from_a_zip_file(tmp_path):
    package = Path(hl.__file__).parent
    zipped = shutil.make_archive(str(tmp_path / "hookline"), "zip", package.parent, package.name)
    page = tmp_path / "page.html"
    done = run_python("-c", textwrap.dedent(FROM_ZIP), zipped, page)
    assert done.returncode == 0, done.stderr
    assert "DigitsNet" in page.read_text("utf-8")
