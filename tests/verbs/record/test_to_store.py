"""record(to=): each pass of a loop of one's own is on disk when the next one begins."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

import pytest
import torch
from torch import nn

import hookline as hl
from forked_children import child, forked, told_by

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_each_pass_is_stored_row_by_row(net, tmp_path):
    with hl.record(net, ["0", "2:input"]) as run, hl.record(net, "0", to=tmp_path / "s") as line:
        for n in (5, 3, 4):
            net(X[:n])
    store = hl.open(tmp_path / "s")
    assert store.sites == line.store.sites == ("0",)
    expected = torch.cat([net[0](X[:n]) for n in (5, 3, 4)]).detach()
    assert torch.equal(store["0"][:], expected)
    assert store.items[:].tolist() == list(range(12))
    assert len(run.passes) == 3


def test_gradients_come_with_their_pass(net, tmp_path):
    with hl.record(net, "2", ports=("output", "grad_output")) as run:
        for n in (5, 3):
            net(X[:n]).square().sum().backward()
    with hl.record(net, "2", ports=("output", "grad_output"), to=tmp_path / "s") as line:
        for n in (5, 3):
            net(X[:n]).square().sum().backward()
    assert torch.equal(line.store["2:grad_output"][:], run.cat("2:grad_output"))


@pytest.mark.slow
def test_passes_are_let_go_of_when_they_are_written(tmp_path, monkeypatch):
    module = importlib.import_module("hookline.verbs.record.to_store")
    monkeypatch.setattr(module, "SHARD_BYTES", 1)  # a shard a pass
    shape = torch.Size([7, 13])

    def n_alive():
        return sum(isinstance(one, torch.Tensor) and one.shape == shape for one in gc.get_objects())

    net, found = nn.Sequential(nn.Identity()), []
    with hl.record(net, "0", to=tmp_path / "s"):
        for _ in range(20):
            net(torch.zeros(shape))
            found.append(n_alive())
    assert max(found) <= 5  # this pass, the one before, and those that wait for the disk
    assert len(hl.open(tmp_path / "s")) == 20 * 7


class Branching(nn.Module):
    """Reaches `deep` only where the mean is positive; raises where it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.deep = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, fail=False):
        y = self.first(x)
        if fail:
            raise ZeroDivisionError
        return self.deep(y) if x.mean() > 0 else y


def test_passes_without_rows_are_told_by_their_numbers(tmp_path):
    model = Branching()
    with pytest.warns(hl.HooklineWarning) as told:
        with hl.record(model, "deep", to=tmp_path / "s") as line:
            for sign, fail in [(1, False), (-1, False), (1, True), (-1, False)]:
                with contextlib.suppress(ZeroDivisionError):
                    model(sign * torch.ones(2, 4), fail)
    (warning,) = map(str, (one.message for one in told))
    assert "3 of 4 passes added no rows" in warning
    assert "no selected site had a value (pass 1, 3); the model raised (pass 2)." in warning
    assert len(line.store) == 2


def test_a_pass_with_one_of_two_sites_is_told_as_such(tmp_path):
    model = Branching()
    with pytest.raises(hl.NotRecordedError, match=r"none in pass 1: deep was selected.*not fire"):
        with hl.record(model, ["first", "deep"], to=tmp_path / "s"):
            model(torch.ones(2, 4))
            model(-torch.ones(2, 4))
    why = r"4 of 6 passes .* missing \(pass 1\); the model raised \(pass 2, 5\); .* form \(pass 4\)"
    with pytest.warns(hl.HooklineWarning, match=why):
        size = [4]
        options = {"keep": lambda tensor: tensor[..., : size[0]], "to": tmp_path / "t"}
        with hl.record(model, ["first", "deep"], **options):
            for sign, size[0] in [(1, 4), (-1, 4), (1, 4), (1, 4), (1, 3), (1, 4)]:
                with contextlib.suppress(hl.HooklineError):  # it comes when the next pass begins
                    model(sign * torch.ones(2, 4))


@pytest.mark.filterwarnings("error")
def test_where_each_pass_has_rows_nothing_is_told(net, tmp_path):
    with hl.record(net, "0", to=tmp_path / "s") as line:
        net(X)
    assert len(line.store) == 5


def test_keep_and_dtype_say_what_is_stored(net, tmp_path):
    with hl.record(net, "0", to=tmp_path / "s", keep=torch.sign, dtype=torch.float16) as line:
        net(X)
    assert line.store["0"].dtype is torch.float16
    assert torch.equal(line.store["0"][:], net[0](X).sign().half().detach())


def test_a_folder_that_holds_something_is_refused(net, tmp_path):
    with hl.record(net, "0", to=tmp_path / "s"):
        net(X)
    with pytest.raises(hl.FolderError, match=r"must be empty(.|\n)*cannot be resumed"):
        hl.record(net, "0", to=tmp_path / "s")
    assert not net[0]._forward_hooks


def test_values_are_looked_up_in_the_store(net, tmp_path):
    with hl.record(net, "0", to=tmp_path / "new") as line:
        net(torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"got the line.*\n.*line\.store\[\.\.\.\]"):
        line["0"]


@pytest.mark.slow
def test_it_is_written_also_where_the_loop_raises(net, tmp_path):
    with pytest.raises(ZeroDivisionError):
        with hl.record(net, "0", to=tmp_path / "s"):
            net(X)
            net(X)
            1 / 0  # noqa: B018
    assert len(hl.open(tmp_path / "s")) == 10
    assert not net[0]._forward_hooks


def test_a_last_pass_of_another_shape_loses_none_before_it(net, tmp_path):
    with pytest.raises(hl.StructureError, match="as in the first batch"):
        with hl.record(net, "", to=tmp_path / "s", keep=lambda t: t if len(t) > 2 else t[:, :1]):
            net(X)
            net(X)
            net(X[:2])
    store = hl.open(tmp_path / "s")
    assert torch.equal(store[""][:], torch.cat([net(X), net(X)]).detach())


def test_a_folder_with_other_files_is_left_as_it_was(net, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(hl.FolderError, match="must be empty"):
        hl.record(net, "0", to=tmp_path)
    with pytest.raises(hl.FolderError, match="must be empty"):
        hl.extract(net, X, "0", tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_line_that_saw_no_pass_writes_no_store(net, tmp_path):
    with pytest.warns(hl.HooklineWarning, match="saw nothing"):
        with hl.record(net, "0", to=tmp_path / "s") as line:
            pass
    with pytest.raises(hl.FolderError, match="manifest"):
        assert line.store


@pytest.mark.parametrize("options", [{"every_thread": True}])
def test_rows_of_several_threads_are_refused(net, tmp_path, options):
    with pytest.raises(hl.AttachError, match="to= must have a model and one thread"):
        hl.record(net, "0", to=tmp_path / "s", **options)
    assert not net[0]._forward_hooks


def test_gradients_of_parameters_need_rows_by_keep(net, tmp_path):
    with pytest.raises(hl.AttachError, match=r"row for each item, got 2\.weight:grad"):
        hl.record(net, "2.weight", ports=("grad",), to=tmp_path / "s")
    assert not os.path.exists(tmp_path / "s")
    options = {"ports": ("grad",), "keep": lambda tensor: tensor.flatten()[None]}
    with hl.record(net, "2.weight", to=tmp_path / "s", **options) as line:
        for n in (5, 3):
            net(X[:n]).sum().backward()
    assert line.store["2.weight:grad"].shape == (2, net[2].weight.numel())


def test_an_error_before_the_backward_stays_the_error(net, tmp_path):
    with pytest.warns(hl.HooklineWarning, match=r"1 of 2 passes .* missing \(pass 1\)"):
        with pytest.raises(KeyboardInterrupt):
            with hl.record(net, "2", ports=("output", "grad_output"), to=tmp_path / "s"):
                net(X).sum().backward()
                net(X)
                raise KeyboardInterrupt
    assert len(hl.open(tmp_path / "s")) == len(X)


def test_a_gradient_that_comes_too_late_is_named(net, tmp_path):
    with pytest.raises(hl.NotRecordedError, match=r"(?s)none in pass 0: 2:grad.*runs again"):
        with hl.record(net, "2", ports=("output", "grad_output"), to=tmp_path / "s"):
            first = net(X)
            net(X)
            first.sum().backward()


@pytest.mark.processes
def test_a_forked_child_writes_nothing_and_says_so_once(net, tmp_path):
    expected = net(X)
    line = hl.record(net, "0", to=tmp_path / "s")
    net(X)

    def run():
        assert all(torch.equal(net(X), expected) for _ in range(3))
        line.remove()

    def action():
        told = told_by(run)
        with hl.record(net, "0", to=tmp_path / "own") as own:
            net(X[:2])
        return told, len(own.store)

    told, n_own = child(action)
    assert [f"not written to {tmp_path / 's'}" in one for one in told] == [True]
    assert n_own == 2
    assert os.listdir(tmp_path / "s") == [".lock"]
    with pytest.raises(hl.FolderError, match="this process is writing"):
        hl.record(net, "0", to=tmp_path / "s")
    net(X[:3])
    line.remove()
    assert torch.equal(line.store["0"][:], torch.cat([net[0](X), net[0](X[:3])]).detach())


@pytest.mark.processes
def test_a_child_that_goes_on_longer_leaves_a_whole_store(net, tmp_path, monkeypatch):
    module = importlib.import_module("hookline.verbs.record.to_store")
    monkeypatch.setattr(module, "SHARD_BYTES", 1)  # a shard a pass
    line = hl.record(net, "0", to=tmp_path / "s")
    net(X)
    net(X)
    reading, writing = os.pipe()

    def action():
        os.read(reading, 1)  # until the parent has ended
        for _ in range(5):
            net(X * 2)
        line.remove()

    answer = forked(action)
    line.remove()
    before = {path: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    os.write(writing, b"x")
    assert answer() is None
    assert {path: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
    assert len(hl.open(tmp_path / "s")) == 2 * len(X)
    os.close(reading), os.close(writing)


def test_a_full_disk_advises_a_new_folder(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    model = nn.Linear(2, 3)
    with pytest.raises(hl.FolderError) as caught, hl.record(model, to=tmp_path / "s"):
        model(torch.zeros(4, 2))
        monkeypatch.setattr("hookline.files.folder_or_url._write", refuse)
    assert str(caught.value).endswith(
        "Free space on the disk. What was written before is whole."
        " A loop of your own cannot be resumed: run it again, with a new folder."
    )
