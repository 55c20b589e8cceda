"""extract: each item's row is the model's own value, whatever happens on the way."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import random
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from hookline.files.folder_or_url import as_place
from hookline.files.sealed_json import seal_json
from hookline.stores import job_manifest as manifest_module
from hookline.stores.batch_columns import CpuOffload
from hookline.stores.job_manifest import compared_environment, write_manifest
from hookline.stores.merging import merge
from thoroughness import tries
from zoo import SmallNet

ROWS = torch.randn(100, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SMALL = {"batch_size": 7, "shard_bytes": 4000}


def files(folder):
    """The bytes of each shard, and of what the manifest says of them."""
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}
    assert found
    return found


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SmallNet()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A store that was made at one go."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    hl.extract(model, ROWS, ["stem", "layer1.0.relu:input"], folder, **SMALL)
    return folder


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 7, 100, 1000])
def test_rows_are_the_models_own_values_bit_by_bit(model, tmp_path, batch_size):
    sites = ["stem", "layer1.0.relu:input", "fc", ""]
    store = hl.extract(model, ROWS, sites, tmp_path / "s", batch_size=batch_size)
    with torch.no_grad():
        feats = hl.features(model, iter(ROWS.split(batch_size)), sites, copy=True)
    for site in sites:
        assert torch.equal(store[site][:], feats.cat(site)), site
    assert store.items[:].tolist() == list(range(100))


def test_batches_for_a_model_on_the_cpu_are_waited_for(tmp_path, monkeypatch):
    # From a GPU, torch copies to the CPU in the background if non_blocking is True.
    to, asked = torch.Tensor.to, []

    def moved(tensor, device, *, non_blocking=False):
        asked.append(non_blocking)
        return to(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", moved)
    hl.extract(nn.Identity(), torch.zeros(4, 1), "", tmp_path / "s", batch_size=2)
    assert asked == [False, False]


def test_few_batches_wait_for_the_device(tmp_path, monkeypatch):
    begun, ended, waiting = [], [], []

    def ready(offload):
        begun.append(offload)
        waiting.append(len(begun) - len(ended))
        return lambda: ended.append(offload)

    monkeypatch.setattr(CpuOffload, "make_waiter", ready)
    hl.extract(nn.Identity(), torch.zeros(40, 1), "", tmp_path / "s", batch_size=2)
    assert len(waiting) > 20
    assert max(waiting) <= 4  # that of the shard is one of them


def test_a_value_that_is_overwritten_in_place_is_stored_in_time(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(10, 4)
    store = hl.extract(net, x, ["0", "1"], tmp_path / "s")
    assert torch.equal(store["0"][:], net[0](x))
    assert (store["0"][:] < 0).any()


def test_the_model_runs_in_eval_mode_and_keeps_its_own(tmp_path, left_as_found):
    net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
    net[1].eval()
    x = torch.randn(10, 4)
    before = left_as_found(net)
    store = hl.extract(net, x, "0", tmp_path / "s")
    assert torch.equal(store["0"][:], x)
    assert left_as_found(net) == before
    torch.manual_seed(0)
    noisy = hl.extract(net, x, "0", tmp_path / "t", eval=False)
    assert (noisy["0"][:] == 0).any()


def test_only_the_first_batch_runs_past_the_last_site(tmp_path):
    ran = []

    class Head(nn.Module):
        def forward(self, x):
            ran.append(len(x))
            raise RuntimeError("it is not asked for")

    net = nn.Sequential(nn.Identity(), Head())
    store = hl.extract(net, ROWS, "0", tmp_path / "s", batch_size=30)
    assert torch.equal(store["0"][:], ROWS)
    assert ran == [30]


def test_a_module_that_runs_again_later_is_ambiguous(tmp_path):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Flatten(0)

        def forward(self, x):
            return self.block(self.block(x) + 1)

    with pytest.raises(hl.AmbiguousError, match=r"got 2 calls(.|\n)*'block#0'"):
        hl.extract(Shared(), torch.zeros(4), "block", tmp_path / "s")
    store = hl.extract(Shared(), torch.zeros(4), "block#1", tmp_path / "t")
    assert store["block#1"][:].tolist() == [1, 1, 1, 1]


class Draws(nn.Module):
    """A model that draws from each global generator, in any mode."""

    def forward(self, x):
        return F.dropout(x) + random.random() + float(np.random.rand())


def test_a_model_that_draws_gives_the_same_when_resumed(tmp_path):
    options = {"keep": lambda t: t + torch.rand(()), **SMALL}
    states = random.getstate(), torch.get_rng_state()
    hl.extract(Draws(), ROWS, "", tmp_path / "whole", **options)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    torch.manual_seed(3)
    hl.extract(Draws(), ROWS, "", tmp_path / "again", **options)
    for name in sorted(files(tmp_path / "again"))[1::2]:
        (tmp_path / "again" / name).unlink()
    (tmp_path / "again" / "shard-00000000.safetensors").unlink()
    manifest = tmp_path / "again" / "manifest.json"
    write_manifest(as_place(tmp_path / "again"), json.loads(manifest.read_text())["job"], {})
    torch.manual_seed(4)
    with pytest.warns(hl.HooklineWarning, match="was begun elsewhere"):
        hl.extract(Draws(), ROWS, "", tmp_path / "again", **options)
    assert files(tmp_path / "again") == files(tmp_path / "whole")
    drawn = hl.open(tmp_path / "whole")[""][:] - ROWS
    assert len(drawn.unique()) > 1000  # not one number for all batches


def test_a_model_that_changes_while_it_runs_is_said(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += len(x)
            return x + self.seen

    with pytest.warns(hl.HooklineWarning, match=r"seen changed while the model ran"):
        hl.extract(Counts(), torch.zeros(4, 2), "", tmp_path / "s")


def test_a_site_without_tensors_is_said_to_have_no_column(tmp_path):
    class Words(nn.Module):
        def forward(self, x):
            return "none"

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body = Words(), nn.Identity()

        def forward(self, x):
            self.words(x)
            return self.body(x)

    with pytest.warns(hl.HooklineWarning, match="words has no tensor in the first batch"):
        store = hl.extract(Net(), torch.zeros(4, 2), ["words", "body"], tmp_path / "s")
    assert list(store.sites) == ["body"]


@pytest.mark.slow
def test_heads_as_many_as_tokens_are_refused_and_not_guessed(tmp_path):
    class Scores(nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.zeros(*input_ids.shape, 3, 3)

    batch = {"input_ids": torch.ones(4, 3).long(), "attention_mask": torch.ones(4, 3).long()}
    with pytest.raises(
        hl.StructureError, match=r"clearly of items or of tokens(.|\n)*flatten\(2\)"
    ):
        hl.extract(Scores(), batch, "", tmp_path / "s")
    store = hl.extract(Scores(), batch, "", tmp_path / "t", keep=lambda t: t.flatten(2))
    assert store[""].is_ragged
    store = hl.extract(Scores(), batch, "", tmp_path / "u", keep=lambda t: t[:, None])
    assert not store[""].is_ragged


def test_keep_and_dtype_say_what_is_stored(model, tmp_path):
    store = hl.extract(
        model, ROWS, "stem", tmp_path / "s", keep=lambda t: t.mean((2, 3)), dtype=torch.bfloat16
    )
    stem = hl.features(model, iter(ROWS.split(32)), "stem").cat("stem")
    assert store["stem"].dtype is torch.bfloat16
    assert torch.equal(store["stem"][:], stem.mean((2, 3)).bfloat16().detach())


def test_each_tensor_of_a_structure_is_a_column(tmp_path):
    class Two(nn.Module):
        def forward(self, x):
            return x + 1, {"half": x / 2, "name": "none"}

    store = hl.extract(Two(), torch.arange(6.0)[:, None], "", tmp_path / "s")
    assert list(store.sites) == ["(root):output[0]", "(root):output[1].half"]
    assert store["(root):output[1].half"][:, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]


def test_labels_are_left_out_by_inputs(model, tmp_path):
    data = torch.utils.data.TensorDataset(ROWS, torch.arange(100))
    with pytest.raises(hl.InputError, match=r"Give inputs=.*lambda batch: batch\[0\]"):
        hl.extract(model, data, "stem", tmp_path / "s")
    store = hl.extract(model, data, "stem", tmp_path / "s", inputs=lambda batch: batch[0])
    assert len(store) == 100


# -- tokens ---------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A row a token in `block`, a row an item in `pool`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.pool = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, input_ids, attention_mask):
        return self.pool(self.block(self.embed(input_ids)).mean(1))


def tokenize(texts, left=False):
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        at = slice(longest - len(text), longest) if left else slice(0, len(text))
        ids[row, at] = torch.tensor([ord(letter) % 50 for letter in text])
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


TEXTS = ["abcdef"[: 1 + k % 6] * (1 + k % 3) for k in range(40)]


@pytest.mark.parametrize("left", [False, True])
def test_tokens_have_a_row_each_and_padding_has_none(tmp_path, left):
    net = Encoder()

    def tokenizer(texts):
        return tokenize(texts, left)

    store = hl.extract(
        net, TEXTS, ["block", "pool"], tmp_path / "s", tokenize=tokenizer, batch_size=8
    )
    assert len(store) == 40
    assert len(store["block"]) == len(store.tokens) == sum(map(len, TEXTS))
    assert store["pool"].shape == (40, 4)
    alone = [net.block(net.embed(tokenize([text])["input_ids"][0])) for text in TEXTS]
    torch.testing.assert_close(store["block"][:], torch.cat(alone).detach())
    ids = torch.cat([tokenize([text])["input_ids"][0] for text in TEXTS])
    assert torch.equal(store.tokens[:], ids)


def test_rows_of_changing_shape_without_a_mask_are_refused(tmp_path):
    batches = [torch.ones(2, 3, 4), torch.ones(2, 5, 4)]
    with pytest.raises(hl.StructureError, match=r"rows of \[3, 4\].*got \[5, 4\](.|\n)*mask="):
        hl.extract(nn.Identity(), iter(batches), "", tmp_path / "s")
    store = hl.extract(
        nn.Identity(),
        iter(batches),
        "",
        tmp_path / "t",
        mask=lambda x: torch.full((2,), x.shape[1]),
    )
    assert store["(root)"].shape == (16, 4)


def test_a_finished_store_of_batches_is_not_made_again(tmp_path):
    batches, options = ROWS.split(7), {"shard_bytes": 20_000}
    hl.extract(nn.Identity(), iter(batches), "", tmp_path / "s", **options)
    made = {path: path.stat().st_ino for path in (tmp_path / "s").glob("shard-*")}
    assert len(made) == 5  # the last one is shorter
    hl.extract(nn.Identity(), iter(batches), "", tmp_path / "s", **options)
    assert {path: path.stat().st_ino for path in (tmp_path / "s").glob("shard-*")} == made


def test_a_square_value_is_not_guessed_to_be_of_tokens(tmp_path):
    with pytest.raises(hl.StructureError, match="clearly of items or of tokens"):
        hl.extract(nn.Identity(), torch.ones(4, 3), "", tmp_path / "s", mask=lambda x: x > 0)


class Ids(nn.Module):
    """Embeds ids, and makes of the rows of tokens what it is told to."""

    def __init__(self, then=lambda rows: rows):
        super().__init__()
        self.embed, self.end, self.then = nn.Embedding(50, 3), nn.Identity(), then

    def forward(self, input_ids, attention_mask=None):
        return self.end(self.then(self.embed(input_ids)))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda batch: torch.tensor([5, 6]), "lengths from 0 to 5, the tokens of the batch, got 6"),
        (lambda batch: torch.tensor([5, -1]), "lengths from 0 to 5.*got -1"),
        (lambda batch: torch.tensor([5]), r"each of the 2 items of a batch, got Tensor\[1\]"),
        (lambda batch: torch.ones(3, 5), r"each of the 2 items of a batch, got Tensor\[3, 5\]"),
        (lambda batch: torch.ones(2, 4), r"the ids of tokens, \[2, 5\], got \[2, 4\]"),
        (lambda batch: (batch["input_ids"] - 1) * 1e9, "numbers below 0 or NaN"),
        (lambda batch: torch.full((2, 5), torch.nan), "numbers below 0 or NaN"),
        (lambda batch: torch.ones(2, 1, 5), r"got Tensor\[2, 1, 5\]"),
        (lambda batch: torch.tensor([True, False]), "or a length for each item"),
        (lambda batch: "none", "or a length for each item, got str"),
        ("masks", "be a key of the batch, got 'masks' for a dict with 'input_ids'"),
        (torch.ones(2, 5), "be a key of a batch, a function of one, or None, got Tensor"),
    ],
)
def test_a_mask_that_does_not_fit_the_batch_is_refused(tmp_path, mask, message):
    data = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    with pytest.raises(hl.InputError, match="(?s)mask must.*" + message) as caught:
        hl.extract(Ids(), data, "embed", tmp_path / "s", mask=mask)
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    ("then", "per"),
    [
        (lambda rows: rows.mean(1, keepdim=True).expand(-1, 4, -1), "item"),
        (lambda rows: rows.flatten(0, 1), "token"),
        (lambda rows: rows, "token"),
    ],
)
def test_the_first_batch_decides_what_a_row_is(tmp_path, then, per):
    """Later batches have 4 tokens and rows of 4 parts, or one token for each item."""
    texts = ["abc", "ab", "abcd", "abc", "a", "b"]
    net = Ids(then)
    store = hl.extract(net, texts, "end", tmp_path / "s", tokenize=tokenize, batch_size=2)
    if per == "item":
        assert store["end"].shape == (6, 4, 3)
    else:
        alone = [net.embed(tokenize([text])["input_ids"][0]) for text in texts]
        assert torch.equal(store["end"][:], torch.cat(alone).detach())


# -- again ----------------------------------------------------------------------------------------


def test_a_batch_that_does_not_reach_a_site_is_named(tmp_path):
    class Skips(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if x[0] < 2 else x

    with pytest.raises(hl.NotRecordedError, match=r"0 must have a value.*none for batch 2\."):
        hl.extract(Skips(nn.Identity()), torch.arange(4.0), "0", tmp_path / "s", batch_size=1)


class Stops(Exception):
    pass


class StopsAt(torch.utils.data.Dataset):
    """Fails to load one item, as long as it says which."""

    def __init__(self, at):
        self.at = at

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        if index == self.at:
            raise Stops
        return ROWS[index]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 8, 50, 99])
def test_started_again_it_goes_on_and_the_result_is_the_same(model, tmp_path, at):
    data, folder = StopsAt(at), tmp_path / "s"
    whole = hl.extract(model, StopsAt(None), "stem", tmp_path / "whole", **SMALL)
    with pytest.raises(hl.InputError):
        hl.extract(model, data, "stem", folder, **SMALL)
    data.at = None
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")}
    store = hl.extract(model, data, "stem", folder, **SMALL)
    assert files(folder) == files(tmp_path / "whole")
    assert {name: (folder / name).stat().st_mtime_ns for name in written} == written
    assert torch.equal(store["stem"][:], whole["stem"][:])


def test_of_a_finished_store_only_the_first_batch_runs(whole, model):
    runs = []
    handle = model.stem.register_forward_pre_hook(lambda _, args: runs.append(len(args[0])))
    try:
        store = hl.extract(model, ROWS, ["stem", "layer1.0.relu:input"], whole, **SMALL)
    finally:
        handle.remove()
    assert len(store) == 100
    assert runs == [7]


def test_a_finished_store_may_be_closed_to_writing(whole, model, tmp_path, monkeypatch):
    def refused(lock):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("hookline.files.folder_lock.FolderLock.acquire", refused)
    store = hl.extract(model, ROWS, ["stem", "layer1.0.relu:input"], whole, **SMALL)
    assert len(store) == 100
    with pytest.raises(hl.FolderError, match="Give a folder that you may write to"):
        hl.extract(model, ROWS, "stem", tmp_path / "other")


@pytest.mark.slow
def test_a_damaged_shard_is_found_and_made_again(model, tmp_path, whole):
    folder = tmp_path / "s"
    hl.extract(model, ROWS, ["stem", "layer1.0.relu:input"], folder, **SMALL)
    damaged = sorted(folder.glob("shard-*"))[2]
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    (folder / "shard-00000004.safetensors").unlink()
    with pytest.warns(hl.HooklineWarning, match=r"1 damaged shard .* made again"):
        hl.extract(model, ROWS, ["stem", "layer1.0.relu:input"], folder, **SMALL)
    assert files(folder) == files(whole)


def test_another_job_is_refused_and_its_difference_named(model, tmp_path):
    folder = tmp_path / "s"
    hl.extract(model, ROWS, "stem", folder, **SMALL)
    before = files(folder)
    torch.manual_seed(1)
    other = SmallNet()
    for changed, given, options in [
        ("model.weights", (other, ROWS, "stem"), {}),
        ("sites", (model, ROWS, "fc"), {}),
        ("options.dtype", (model, ROWS, "stem"), {"dtype": torch.float16}),
        ("options.keep", (model, ROWS, "stem"), {"keep": lambda t: t * 2}),
        ("batch_size", (model, ROWS, "stem"), {"batch_size": 8}),
        ("data", (model, ROWS * 2, "stem"), {}),
        ("n_items", (model, ROWS[:50], "stem"), {}),
    ]:
        with pytest.raises(hl.FolderError, match=f"(?s)another job.*{changed}.*in the store, now"):
            hl.extract(*given, folder, **{**SMALL, **options})
    assert files(folder) == before
    with pytest.raises(hl.FolderError, match="holds a store already"):
        hl.extract(model, ROWS, "stem", folder, resume=False, **SMALL)


class Scaled(nn.Module):
    """A model of which a part is a plain attribute."""

    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(192, 8)
        self.act = nn.ReLU()
        self.scale = scale

    def forward(self, x):
        return self.act(self.fc(x.flatten(1))) * self.scale


def with_attribute(model):
    model.scale = 2.0
    return contextlib.nullcontext()


@contextlib.contextmanager
def with_code(model):
    before, Scaled.forward = Scaled.forward, lambda self, x: self.fc(x.flatten(1))
    yield
    Scaled.forward = before


@contextlib.contextmanager
def with_hook(model):
    handle = model.fc.register_forward_hook(lambda module, args, output: output * 0)
    yield
    handle.remove()


@contextlib.contextmanager
def with_pre_hook(model):
    handle = model.act.register_forward_pre_hook(lambda module, args: (-args[0],))
    yield
    handle.remove()


CHANGES = [
    (with_attribute, r"Scaled.scale: 1.0 in the store, now 2.0"),
    (with_code, r"code of Scaled: another one than in the store"),
    (
        with_hook,
        r"forward hook at fc \(with_hook.<locals>.<lambda>\): not there when",
    ),
    (with_pre_hook, r"forward_pre hook at act \(.*\): not there when the store was begun"),
    (lambda model: hl.edit(model, "fc", lambda t: t * 0), r"forward hook at fc \(edit fc\): not"),
]
FIRST = r"(?s)holds a store of another model.*\n  \(root\): values differ by about .*\n  "


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [False, True], ids=["killed", "finished"])
@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_model_that_does_something_else_is_refused(tmp_path, is_finished, change, reason):
    model, data, folder = Scaled(), StopsAt(None if is_finished else 50), tmp_path / "s"
    small = {"batch_size": 7, "shard_bytes": 400}
    with contextlib.nullcontext() if is_finished else pytest.raises(hl.InputError):
        hl.extract(model, data, "", folder, **small)
    data.at, before = None, files(folder)
    with change(model), pytest.raises(hl.FolderError, match=FIRST + reason):
        hl.extract(model, data, "", folder, **small)
    assert files(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nhead": 4}, r"MultiheadAttention.num_heads: 2 in the store, now 4"),
        (
            {"activation": "gelu"},
            r"activation_relu_or_gelu: 1 in the store, now 2",
        ),
        ({"norm_first": True}, r"TransformerEncoderLayer.norm_first: False in the store, now True"),
    ],
)
def test_heads_and_activation_and_the_norms_place_count(tmp_path, options, reason):
    def layer(**options):
        torch.manual_seed(0)
        given = {"nhead": 2, **options}
        return nn.TransformerEncoderLayer(8, dim_feedforward=16, batch_first=True, **given)

    rows = ROWS[:, 0]
    hl.extract(layer(), rows, "norm2", tmp_path / "s", **SMALL)
    with pytest.raises(hl.FolderError, match=r"(?s)norm2: values differ.*" + reason):
        hl.extract(layer(**options), rows, "norm2", tmp_path / "s", **SMALL)


def test_a_change_that_half_precision_nearly_hides_is_refused(tmp_path):
    class Normed(Scaled):
        def forward(self, x):
            return F.layer_norm(super().forward(x), (8,), eps=1e-9)

    model = Normed().bfloat16()
    rows = ROWS.bfloat16()
    hl.extract(model, rows, "", tmp_path / "s", **SMALL)
    model.scale = 1.5
    with pytest.raises(hl.FolderError, match=r"scale: 1.0 in the store, now 1.5"):
        hl.extract(model, rows, "", tmp_path / "s", **SMALL)


def test_a_value_that_gets_another_shape_is_refused_at_once(tmp_path):
    model, data = Scaled(), StopsAt(50)
    with pytest.raises(hl.InputError):
        hl.extract(model, data, "", tmp_path / "s", **SMALL)
    data.at = None
    handle = model.register_forward_hook(lambda module, args, output: output[:, :2])
    with pytest.raises(hl.FolderError, match=r"\(root\): '\[8\] F32 an item' in the store, now"):
        hl.extract(model, data, "", tmp_path / "s", **SMALL)
    handle.remove()


class Noisy(Scaled):
    """A model that draws from a generator of its own: its values do not repeat."""

    def __init__(self):
        super().__init__()
        self._generator = [torch.Generator()]

    def forward(self, x):
        return super().forward(x) + torch.randn(8, generator=self._generator[0])


def test_a_model_that_does_not_repeat_is_not_refused(tmp_path):
    model, data = Noisy(), StopsAt(50)
    with pytest.raises(hl.InputError):
        hl.extract(model, data, "", tmp_path / "s", **SMALL)
    data.at = None
    with pytest.warns(hl.HooklineWarning, match=r"gives other values each time it runs"):
        store = hl.extract(model, data, "", tmp_path / "s", **SMALL)
    assert len(store) == 100
    with pytest.warns(hl.HooklineWarning, match=r"so another model is not noticed"):
        hl.extract(model, data, "", tmp_path / "s", **SMALL)


@pytest.mark.slow
def test_dropout_and_writes_into_the_input_do_repeat(tmp_path):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(192, 4))
    given = {"eval": False, **SMALL}
    hl.extract(model, ROWS, "", tmp_path / "s", **given)
    hl.extract(model, ROWS, "", tmp_path / "s", **given)
    model[1].p = 0.25
    with pytest.raises(hl.FolderError, match=r"structure"):
        hl.extract(model, ROWS, "", tmp_path / "s", **given)
    model[1].p = 0.5
    edit = hl.edit(model, "1", lambda t: t * 2)
    with edit, pytest.raises(hl.FolderError, match=r"forward hook at 1 \(edit 1\)"):
        hl.extract(model, ROWS, "", tmp_path / "s", **given)


def test_batches_of_an_iterator_show_another_model_too(tmp_path):
    model = Scaled()
    hl.extract(model, iter(ROWS.split(7)), "", tmp_path / "s")
    assert len(hl.extract(model, iter(ROWS.split(7)), "", tmp_path / "s")) == 100
    model.scale = 2.0
    with pytest.raises(hl.FolderError, match=FIRST + r"Scaled.scale"):
        hl.extract(model, iter(ROWS.split(7)), "", tmp_path / "s")


def test_equal_values_of_other_code_are_not_refused(tmp_path, monkeypatch):
    hl.extract(Scaled(), ROWS, "", tmp_path / "s", **SMALL)
    monkeypatch.setattr(
        Scaled, "forward", lambda self, x: self.scale * self.act(self.fc(x.flatten(1)))
    )
    assert len(hl.extract(Scaled(), ROWS, "", tmp_path / "s", **SMALL)) == 100


def test_a_store_without_first_values_is_warned_of(tmp_path):
    hl.extract(Scaled(), ROWS, "", tmp_path / "s", **SMALL)
    path = tmp_path / "s" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["job"]["first_batch"]
    manifest["checksum"] = "0" * 16
    path.write_bytes(seal_json(manifest))
    with pytest.warns(hl.HooklineWarning, match=r"was begun by an older hookline"):
        hl.extract(Scaled(2.0), ROWS, "", tmp_path / "s", **SMALL)


@pytest.mark.slow
def test_another_autocast_is_warned_of(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    data = StopsAt(50)
    inputs = {"inputs": lambda x: x.flatten(2)[:, 0, :8].float(), **SMALL}
    with torch.autocast("cpu"), pytest.raises(hl.InputError):
        hl.extract(net, data, "0", tmp_path / "s", dtype=torch.float32, **inputs)
    data.at = None
    with pytest.warns(hl.HooklineWarning, match=r"autocast was \['cpu torch.bfloat16'\], is \[\]"):
        hl.extract(net, data, "0", tmp_path / "s", dtype=torch.float32, **inputs)


@pytest.mark.slow
def test_other_threads_are_warned_of(model, tmp_path):
    threads = torch.get_num_threads()
    hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    torch.set_num_threads(threads + 1)
    try:
        hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)  # no shard is new: no warning
        (tmp_path / "s" / "shard-00000000.safetensors").unlink()
        with pytest.warns(hl.HooklineWarning, match=f"threads was {threads}, is {threads + 1}"):
            hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_store_tells_versions_and_the_seed_as_recordings_do(model, tmp_path, monkeypatch):
    for name, version in (("timm", "9.9"), ("transformers", "8.8")):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    torch.manual_seed(7)
    with hl.record(model, "stem") as run:
        model(ROWS)
    recorded = hl.open(run.save(tmp_path / "run")).provenance
    told = hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL).provenance
    assert told.versions == recorded.versions
    assert (told.versions["timm"], told.versions["transformers"]) == ("9.9", "8.8")
    assert recorded.flags.items() <= told.flags.items()
    assert told.flags["seed"] == "7"
    torch.manual_seed(8)  # not compared: no warning
    (tmp_path / "s" / "shard-00000000.safetensors").unlink()
    again = hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    assert again.provenance.flags["seed"] == "8"
    assert merge([tmp_path / "s"], tmp_path / "merged").provenance == again.provenance


@pytest.mark.slow
def test_another_processor_is_warned_of(model, tmp_path, monkeypatch):
    hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    assert compared_environment()["machine"].startswith(platform.machine())
    monkeypatch.setattr(manifest_module, "_processor_text", lambda: "x86_64 AVX2 Other")
    (tmp_path / "s" / "shard-00000000.safetensors").unlink()
    with pytest.warns(hl.HooklineWarning, match=r"machine was .*, is x86_64 AVX2 Other"):
        hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)


def in_a_child(work):
    """Fork, and run a function in the child; the child's process id."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.processes
def test_killed_at_many_moments_the_result_is_bit_identical(model, tmp_path):
    """Each start is killed at a random moment; the last is left alone."""
    chance = random.Random(0)
    folder, options = tmp_path / "killed", {"batch_size": 2, "shard_bytes": 1}

    def work(folder=folder):
        hl.extract(model, ROWS, ["stem", "layer1.0.relu:input"], folder, **options)

    os.waitpid(in_a_child(lambda: work(tmp_path / "whole")), 0)
    n_killed, n_moments = 0, tries(20, gate=8)
    for _ in range(n_moments):
        child = in_a_child(work)
        n_before = len(list(folder.glob("shard-*")))
        until = n_before + chance.randrange(4)
        while len(list(folder.glob("shard-*"))) < until and os.waitpid(child, os.WNOHANG)[0] == 0:
            pass
        try:
            os.kill(child, signal.SIGKILL)
            n_killed += 1
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    os.waitpid(in_a_child(work), 0)
    assert n_killed > n_moments / 2
    assert files(folder) == files(tmp_path / "whole")
    assert len(hl.open(folder, verify=True)) == 100
    assert not list(folder.glob(".*.part"))


FILL = """
import sys, torch, hookline as hl
rows = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
model = torch.nn.Identity()
try:
    hl.extract(model, rows, "", sys.argv[1] + "/s", batch_size=100, shard_bytes=10_000)
except hl.FolderError as error:
    print(error)
for path in (__import__("pathlib").Path(sys.argv[1]) / "s").glob("shard-*"):
    assert path.stat().st_size > 6000
    n = len(list(path.parent.glob("shard-*")))
print(n, "shards")
"""


@pytest.mark.processes
def test_a_full_disk_leaves_whole_shards_and_says_so(tmp_path):
    """On a file system of 100 kB, of its own name space."""
    script = 'mount -t tmpfs -o size=100k none "$1" && exec "$2" -c "$3" "$1"'
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FILL],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "the store will take about 125 KiB, and" in found.stderr
    assert "has 96.0 KiB free" in found.stderr
    assert "No space left on device" in found.stdout
    assert "Free space on the disk." in found.stdout
    assert int(found.stdout.split()[-2]) > 2


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e5m2])
def test_numbers_that_are_not_finite_are_kept_and_said(tmp_path, dtype):
    rows = torch.ones(10, 4)
    rows[3, 1], rows[7] = torch.nan, torch.inf
    rows = rows.to(dtype)
    with pytest.warns(hl.HooklineWarning, match=r"5 numbers at \(root\) are NaN or infinite"):
        store = hl.extract(nn.Identity(), rows, "", tmp_path / "s")
    assert torch.equal(store["(root)"][:].isnan(), rows.isnan())
    assert store.statistics["(root)"].non_finite == 5
    assert store.statistics["(root)"].mean == 1


class Broken(StopsAt):
    def __getitem__(self, index):
        if index in (0, 13, *range(21, 28)):
            raise OSError(f"item {index} is broken")
        return ROWS[index]


def test_items_that_fail_are_left_out_and_listed(model, tmp_path):
    with pytest.raises(hl.InputError, match="item 0 is broken"):
        hl.extract(model, Broken(None), "stem", tmp_path / "s", **SMALL)
    with pytest.warns(hl.HooklineWarning, match="9 items could not be loaded"):
        store = hl.extract(model, Broken(None), "stem", tmp_path / "t", on_error="skip", **SMALL)
    gone = [0, 13, *range(21, 28)]
    assert [item for item, _ in store.skipped] == gone
    assert store.items[:].tolist() == [k for k in range(100) if k not in gone]
    assert "item 13 is broken" in store.skipped[1][1]


def test_a_second_writer_is_refused(model, tmp_path):
    from hookline.files.folder_or_url import as_place, locked

    with locked(as_place(tmp_path / "s")):
        with pytest.raises(hl.FolderError, match=r"this process is writing to .* already"):
            hl.extract(model, ROWS, "stem", tmp_path / "s")
    hl.extract(model, ROWS, "stem", tmp_path / "s")


def test_a_folder_with_other_files_is_refused(model, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(hl.FolderError, match=r"must be empty or hold a store.*mine\.txt"):
        hl.extract(model, ROWS, "stem", tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_recording_is_refused_and_left_as_it_was(model, tmp_path):
    with hl.record(model, "stem") as run:
        model(ROWS[:2])
    run.save(tmp_path)
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(hl.FolderError, match="not a store"):
        hl.extract(model, ROWS, "stem", tmp_path)
    assert sorted(os.listdir(tmp_path)) == names
    run.save(tmp_path)  # a file of a lock would be another program's


class Gives(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def as_nested(x):
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


@pytest.mark.parametrize(
    ("net", "selector", "error", "message"),
    [
        (SmallNet(), "nowhere", hl.SelectionError, "matches no module"),
        (
            SmallNet(),
            "stem:grad_output",
            hl.SelectionError,
            "sites of the forward, got stem:grad_output",
        ),
        (nn.Sequential(nn.Flatten(0)), "0", hl.StructureError, "a row for each of the 7 items"),
        (Gives(torch.Tensor.to_sparse), "", hl.StructureError, "got a sparse_coo one.*to_dense"),
        (Gives(lambda x: x.cdouble()), "", hl.StructureError, "got one of torch.complex128"),
        (Gives(as_nested), "", hl.StructureError, "got a nested one.*to_padded"),
        (Gives(lambda x: x.to("meta")), "", hl.StructureError, "on the meta device"),
        (nn.Conv2d(3, 1, 1, device="meta"), "", hl.StructureError, "on the meta device.*to_empty"),
        (Gives(lambda x: None), "", hl.StructureError, "must have a tensor, got none at .root."),
    ],
)
def test_what_cannot_be_stored_is_refused_before_any_writing(
    tmp_path, net, selector, error, message
):
    with pytest.raises(error, match=f"(?s){message}"):
        hl.extract(net, ROWS, selector, tmp_path / "s", **SMALL)
    assert not list(tmp_path.glob("s/[!.]*"))


def test_a_last_row_that_a_model_squeezed_away_is_refused(tmp_path):
    model = Gives(lambda x: x.sum(1).squeeze())
    with pytest.raises(hl.StructureError, match=r"row for each of the 1 items .* got Tensor\[\]"):
        hl.extract(model, torch.ones(5, 3), "", tmp_path / "s", batch_size=4)


def test_a_module_that_runs_twice_needs_its_call(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Identity()

        def forward(self, x):
            return self.block(self.block(x) + 1)

    x = torch.zeros(4, 2)
    store = hl.extract(Twice(), x, "block#1", tmp_path / "s")
    assert torch.equal(store["block#1"][:], x + 1)


@pytest.mark.parametrize(
    "option",
    [
        {"shard_bytes": 0}, {"shard_bytes": 1e6}, {"shard_bytes": True}, {"shard_bytes": None},
        {"inputs": 3}, {"mask": 3}, {"eval": "no"},
    ],
)  # fmt: skip
def test_an_option_of_another_type_is_refused(model, tmp_path, option):
    (name,) = option
    with pytest.raises(hl.InputError, match=f"^{name} must be .*, got .*\n[A-Z]"):
        hl.extract(model, ROWS, "stem", tmp_path / "s", **option)
    assert not (tmp_path / "s").exists()


def test_an_unknown_option_is_refused(model, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtypes'"):
        hl.extract(model, ROWS, "stem", tmp_path / "s", dtypes=torch.float16)


@pytest.mark.slow
def test_a_shard_of_another_job_is_made_again(model, tmp_path):
    """It has the right number, batches and checksums, and wrong rows."""
    options = {"batch_size": 4, "shard_bytes": 1}
    hl.extract(model, ROWS, "stem", tmp_path / "s", **options)
    hl.extract(model, ROWS * 2, "stem", tmp_path / "other", **options)
    before = files(tmp_path / "s")
    foreign = tmp_path / "other" / "shard-00000003.safetensors"
    (tmp_path / "s" / foreign.name).write_bytes(foreign.read_bytes())
    with pytest.warns(hl.HooklineWarning, match="1 damaged shard .* made again"):
        hl.extract(model, ROWS, "stem", tmp_path / "s", **options)
    assert files(tmp_path / "s") == before


class Counted(torch.utils.data.Dataset):
    """Rows of 4 kB, made as they are asked for; notes the process's own memory at some of them."""

    def __init__(self, notes):
        self.notes = notes

    def __len__(self):
        return 50_000

    def __getitem__(self, index):
        if index % 1000 == 999:
            with open("/proc/self/status") as file:
                found = next(line for line in file if line.startswith("RssAnon"))
            with open(self.notes, "a") as file:
                file.write(f"{found.split()[1]}\n")
        return torch.full((1024,), float(index))


@pytest.mark.processes
def test_memory_does_not_grow_with_the_rows(tmp_path):
    def work():
        hl.extract(
            nn.Identity(), Counted(tmp_path / "notes"), "", tmp_path / "s",
            batch_size=100, shard_bytes=800_000,
        )  # fmt: skip

    os.waitpid(in_a_child(work), 0)
    used = [int(line) for line in (tmp_path / "notes").read_text().split()]
    assert len(used) == 50
    assert max(used) < 1.05 * used[0]
    assert len(hl.open(tmp_path / "s")) == 50_000


@pytest.mark.compiles
def test_a_compiled_model_goes_on_with_the_plain_models_store(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    rows = torch.randn(8, 2)
    hl.extract(model, rows, ["0", "1"], tmp_path / "s", batch_size=4)
    before = files(tmp_path / "s")
    hl.extract(
        torch.compile(model, backend="eager"), rows, ["0", "1"], tmp_path / "s", batch_size=4
    )
    model[1] = torch.compile(model[1], backend="eager")
    hl.extract(model, rows, ["0", "1"], tmp_path / "s", batch_size=4)
    assert files(tmp_path / "s") == before


def test_a_thread_that_cannot_be_started_is_said(model, tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        with pytest.raises(hl.HooklineError, match=r"must start threads(.|\n)*ulimit -u"):
            hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    assert hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL).n_rows == len(ROWS)


def test_a_last_batch_of_one_number_is_stored(tmp_path):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x):
            return self.first(x[:, 0])

    rows = torch.arange(6.0).view(3, 2)
    store = hl.extract(First(), rows, "first", tmp_path / "store", batch_size=2)
    assert store["first"][:].tolist() == [0, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        RuntimeError("unable to mmap 9 bytes from file <x>: Too many open files (24)"),
    ],
)
@pytest.mark.parametrize("method", ["read", "view"])
def test_a_shard_that_cannot_be_read_for_now_is_not_removed(
    model, tmp_path, monkeypatch, method, error
):
    from hookline.files.folder_or_url import LocalPlace

    hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    damaged = tmp_path / "s" / "shard-00000000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    before = files(tmp_path / "s")
    real = getattr(LocalPlace, method)

    def fails(place, name, *range):
        if name == "shard-00000002.safetensors":
            raise error
        return real(place, name, *range)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPlace, method, fails)
        with pytest.raises(hl.FolderError, match=r"2\.safetensors cannot be read(.|\n)*ulimit -n"):
            hl.extract(model, ROWS, "stem", tmp_path / "s", **SMALL)
    assert files(tmp_path / "s") == before
