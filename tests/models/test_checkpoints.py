from __future__ import annotations

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hookline.errors import ModelError
from hookline.models.checkpoints import load_state_into, read_state_dict


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class NeedsUnpickling:
    pass


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".PT"])
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 1},
                                  lambda s: {"model": s}])  # fmt: skip
def test_a_state_dict_is_found_alone_or_under_its_usual_keys(tmp_path, suffix, wrap):
    state = nn.Linear(2, 3).state_dict()
    torch.save(wrap(state), tmp_path / f"file{suffix}")
    read = read_state_dict(tmp_path / f"file{suffix}")
    assert list(read) == ["weight", "bias"]
    assert torch.equal(read["weight"], state["weight"])


def test_safetensors_are_read(tmp_path):
    state = nn.Linear(2, 3).state_dict()
    save_file(state, tmp_path / "file.safetensors")
    assert torch.equal(read_state_dict(tmp_path / "file.safetensors")["bias"], state["bias"])


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_the_prefixes_of_wrappers_are_removed(prefix):
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    state = {prefix + key: value for key, value in source.state_dict().items()}
    load_state_into(target, state, "linear", "file.pt")
    assert torch.equal(target.weight, source.weight)


def test_the_prefix_of_a_compiled_submodule_is_removed():
    source, target = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3))
    state = {f"0._orig_mod.{key}": value for key, value in source[0].state_dict().items()}
    load_state_into(target, state, "linear", "file.pt")
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_submodule_that_is_called_module_keeps_its_name():
    source, target = nn.Module(), nn.Module()
    source.module, target.module = nn.Linear(2, 3), nn.Linear(2, 3)
    load_state_into(target, source.state_dict(), "wrapper", "file.pt")
    assert torch.equal(target.module.weight, source.module.weight)


def test_one_key_of_a_tied_parameter_is_enough():
    model = Tied()
    load_state_into(model, {"embed.weight": torch.ones(5, 3)}, "tied", "file.pt")
    assert torch.equal(model.head.weight, torch.ones(5, 3))


def test_older_files_may_leave_out_what_torch_lets_them(tmp_path):
    source, target = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    state = {k: v + 1 for k, v in source.state_dict().items() if k != "num_batches_tracked"}
    load_state_into(target, state, "norm", "file.pt")
    assert torch.equal(target.weight, source.weight + 1)


def test_older_files_may_hold_buffers_that_are_computed_now():
    model = nn.Linear(2, 3)
    model.register_buffer("positions", torch.arange(3), persistent=False)
    state = nn.Linear(2, 3).state_dict()
    load_state_into(model, state | {"positions": torch.zeros(3)}, "linear", "file.pt")
    assert model.positions.tolist() == [0, 1, 2]


def test_keys_that_do_not_fit_are_named_up_to_three_of_each_kind(said):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    state = {"0.weight": torch.zeros(4, 2)} | {f"other.{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(ModelError) as raised:
        load_state_into(model, state, "three", "file.pt")
    assert said(raised) == (
        "file.pt does not fit three. Of its keys: 5 missing (0.bias, 1.weight, 1.bias, ...); "
        "5 unexpected (other.0, other.1, other.2, ...); "
        "1 of another shape (0.weight: 4x2 in the file, 2x2 in the model).\n"
        "Name the model that the file was saved from, or save this model's own: "
        "torch.save(model.state_dict(), FILE)."
    )


def test_a_file_that_needs_unpickling_is_refused_with_its_class(tmp_path, said):
    torch.save({"state_dict": {"a": NeedsUnpickling()}}, tmp_path / "whole.pt")
    with pytest.raises(ModelError, match=r"whole\.pt needs unpickling") as raised:
        read_state_dict(tmp_path / "whole.pt")
    assert "NeedsUnpickling" in said(raised)
    assert "torch.save(model.state_dict(), FILE), or as .safetensors" in said(raised)


def test_a_whole_model_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(ModelError, match=r"needs unpickling \(torch.nn.modules.linear.Linear\)"):
        read_state_dict(tmp_path / "model.pt")


def test_nothing_in_a_pickle_is_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "was_run"), "w"))

    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    with pytest.raises(ModelError):
        read_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "was_run").exists()


def test_a_file_that_would_run_a_command_is_not_called_broken(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.system, ("true",))

    torch.save({"a": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(ModelError, match=r"needs unpickling \((posix|nt)\.system\)"):
        read_state_dict(tmp_path / "evil.pt")


@pytest.mark.parametrize("name", ["short.pt", "text.pt", "empty.pt", "text.safetensors"])
def test_a_broken_file_is_said_to_be_broken(tmp_path, said, name):
    torch.save(nn.Linear(8, 8).state_dict(), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    content = {"short": whole[: len(whole) // 2], "text": b"not a checkpoint", "empty": b""}
    (tmp_path / name).write_bytes(content[name.partition(".")[0]])
    with pytest.raises(ModelError, match=f"{name} cannot be read as a ") as raised:
        read_state_dict(tmp_path / name)
    assert "save it again" in said(raised)


def test_what_is_no_file_is_an_error_that_lists_the_choices(tmp_path, said):
    with pytest.raises(ModelError, match=r"nope\.pt is not there") as raised:
        read_state_dict(tmp_path / "nope.pt")
    assert "default, none, or a file (.pt, .pth, .bin, .ckpt, .safetensors)" in said(raised)
    with pytest.raises(ModelError, match="is a folder, not a file"):
        read_state_dict(tmp_path)


def test_an_unknown_suffix_is_an_error(tmp_path, said):
    (tmp_path / "weights.h5").write_bytes(b"")
    with pytest.raises(ModelError, match=r"must end in \.pt.*, got .*weights\.h5") as raised:
        read_state_dict(tmp_path / "weights.h5")
    assert ".safetensors" in said(raised)


@pytest.mark.parametrize("content", [torch.zeros(3), {"epoch": 3, "lr": 0.1}, {}, [1, 2]])
def test_a_file_without_a_state_dict_is_an_error(tmp_path, said, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ModelError, match="must hold a state dict") as raised:
        read_state_dict(tmp_path / "other.pt")
    assert "under state_dict or model" in said(raised)
