from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from hookline.errors import ModelError
from hookline.models import load_model


@pytest.fixture
def write(tmp_path):
    def write(code: str, name: str = "nets.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(code))
        return str(tmp_path / name)

    return write


NETS = """
    from dataclasses import dataclass
    from torch import nn

    @dataclass
    class Settings:
        width: int = 3

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, Settings().width)

    def make_net():
        return Net().train()

    def make_number():
        return 3

    def make_trouble():
        raise RuntimeError("no luck. Really.")

    ready = Net()
    WIDTH = 3
"""


@pytest.mark.parametrize("factory", ["make_net", "Net", "ready"])
def test_a_function_a_class_or_a_model_in_a_file_makes_the_model(write, factory):
    name = f"{write(NETS)}:{factory}"
    loaded = load_model(name)
    assert type(loaded.model).__name__ == "Net"
    assert not loaded.model.training
    assert loaded.name == name
    assert loaded.tokenize is None
    assert loaded.labels is None


def test_its_pictures_are_prepared_by_the_usual_guess(write):
    loaded = load_model(f"{write(NETS)}:make_net")
    white = loaded.preprocess(Image.new("L", (300, 500), 255))
    assert white.shape == (3, 224, 224)
    expected = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(white[:, 0, 0], expected)


@pytest.mark.parametrize("weights", ["default", "none"])
def test_the_weights_are_as_the_factory_made_them(write, weights):
    code = """
        import torch
        def make():
            net = torch.nn.Linear(1, 1)
            torch.nn.init.constant_(net.weight, 42)
            return net
    """
    assert load_model(f"{write(code)}:make", weights=weights).model.weight.item() == 42


def test_a_checkpoint_file_is_loaded(write, tmp_path):
    torch.save({"_orig_mod.fc.weight": torch.ones(3, 2), "_orig_mod.fc.bias": torch.ones(3)},
               tmp_path / "mine.pt")  # fmt: skip
    loaded = load_model(f"{write(NETS)}:Net", weights=tmp_path / "mine.pt")
    assert torch.equal(loaded.model.fc.weight, torch.ones(3, 2))


def test_modules_beside_the_file_can_be_imported_while_it_runs(write):
    path_before = list(sys.path)
    write("WIDTH = 7", "a_neighbour_of_nets.py")
    code = """
        from torch import nn
        def make():
            from a_neighbour_of_nets import WIDTH
            return nn.Linear(WIDTH, WIDTH)
    """
    assert load_model(f"{write(code)}:make").model.in_features == 7
    assert sys.path == path_before


@pytest.mark.parametrize("name", ["{}:make", "script_of_this_folder:make"])
def test_a_script_gets_no_arguments_and_changes_no_folder(write, monkeypatch, name):
    code = """
        import argparse, os, sys
        from torch import nn
        os.chdir("/")
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=4)
        options = parser.parse_args()
        def make():
            return nn.Linear(options.width, len(sys.argv))
    """
    path = Path(write(code, "script_of_this_folder.py"))
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "argv", ["hookline", "doctor", "nets.py:make"])
    model = load_model(name.format(path)).model
    assert (model.in_features, model.out_features) == (4, 1)
    assert sys.argv[1:] == ["doctor", "nets.py:make"]
    assert Path.cwd() == path.parent


def test_a_module_that_can_be_imported_makes_the_model():
    assert type(load_model("torch.nn:Identity").model) is nn.Identity


def test_a_module_in_the_current_folder_makes_the_model(write, tmp_path, monkeypatch):
    write(NETS, "nets_of_this_folder.py")
    monkeypatch.chdir(tmp_path)
    assert type(load_model("nets_of_this_folder:make_net").model).__name__ == "Net"


def test_a_file_that_is_not_there_is_an_error_with_close_matches(write, tmp_path, said):
    write(NETS)
    with pytest.raises(ModelError, match="is not there") as raised:
        load_model(f"{tmp_path / 'net.py'}:make")
    assert "Did you mean nets.py?" in said(raised)


def test_a_missing_factory_is_an_error_that_lists_what_is_there(write, said):
    with pytest.raises(ModelError, match=r"nets\.py:make_nets: make_nets is not there") as raised:
        load_model(f"{write(NETS)}:make_nets")
    assert said(raised).endswith(
        "Did you mean make_net? "
        "Callable names: Settings, Net, make_net, make_number, make_trouble, ready."
    )
    with pytest.raises(ModelError, match="WIDTH cannot be called"):
        load_model(f"{write(NETS)}:WIDTH")


def test_an_empty_file_is_an_error(write, said):
    with pytest.raises(ModelError, match="It defines no function or class") as raised:
        load_model(f"{write('')}:make")
    said(raised)


def test_what_a_file_merely_imports_is_not_listed(write, said):
    imports = "from functools import partial\nfrom torch.nn import Linear\n"
    with pytest.raises(ModelError, match="It defines no function or class") as raised:
        load_model(f"{write(imports)}:make")
    assert "partial" not in said(raised)
    with pytest.raises(ModelError) as raised:
        load_model(f"{write(imports + 'ready = Linear(1, 1)', 'more.py')}:make")
    assert said(raised).endswith("Callable names: ready.")
    with pytest.raises(ModelError, match=r"Callable names: .*UninitializedBuffer"):
        load_model("torch.nn:make")  # a package offers what it imports


def test_a_factory_that_fails_is_an_error_with_the_line(write, said):
    with pytest.raises(ModelError) as raised:
        load_model(f"{write(NETS)}:make_trouble")
    assert "make_trouble() without arguments failed: RuntimeError: no luck (nets.py, line" in (
        said(raised)
    )
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_factory_with_arguments_is_an_error(said):
    with pytest.raises(ModelError, match="missing 2 required positional arguments") as raised:
        load_model("torch.nn:Linear")
    assert said(raised).endswith("\nGive a function without arguments that returns an nn.Module.")


def test_a_factory_that_returns_something_else_is_an_error(write, said):
    with pytest.raises(ModelError, match=r"must return an nn\.Module, got int") as raised:
        load_model(f"{write(NETS)}:make_number")
    assert "return model" in said(raised)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def make(:", r"SyntaxError: invalid syntax \(nets.py, line 1\)"),
        ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'"),
        ("import sys\nsys.exit(2)", "SystemExit: 2"),
    ],
)
def test_a_file_that_cannot_be_run_is_an_error_with_the_line(write, said, code, why):
    modules_before = set(sys.modules)
    with pytest.raises(ModelError, match=why) as raised:
        load_model(f"{write(code)}:make")
    assert "nets.py cannot be run" in said(raised)
    assert set(sys.modules) == modules_before


def test_a_part_of_a_package_is_told_its_other_name(write, said):
    with pytest.raises(ModelError, match="attempted relative import") as raised:
        load_model(f"{write('from .parts import make')}:make")
    assert "the folder that holds its package, give package.module:FACTORY" in said(raised)


def test_a_module_that_is_not_there_is_an_error(said):
    with pytest.raises(ModelError, match="the module 'never_there' must be importable") as raised:
        load_model("never_there.nets:make")
    assert "path/to/file.py:FACTORY" in said(raised)


def test_a_module_whose_own_import_fails_is_an_error(write, tmp_path, monkeypatch, said):
    write("import a_package_that_is_not_there", "nets_that_fail.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="the module nets_that_fail cannot be imported") as raised:
        load_model("nets_that_fail:make")
    assert "(nets_that_fail.py, line 1)" in said(raised)
