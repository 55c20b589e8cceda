"""Stores and recordings at a URL of S3, on a server on this machine: as whole as in a folder."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest
import torch
from torch import nn

import hookline as hl
from thoroughness import tries

pytestmark = pytest.mark.processes

ROWS = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
N_SHARDS = tries(30, gate=10)  # each takes several requests
SMALL = {"batch_size": len(ROWS) // N_SHARDS, "shard_bytes": 1, "progress": False}


@pytest.fixture(scope="module")
def server():
    """An S3 server in a process of its own, and what fsspec needs to find it."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    ours = {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        server = ThreadedMotoServer(port=0)
        server.start()
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        yield
        server.stop()


@pytest.fixture
def bucket(server, request):
    import s3fs

    name = f"bucket-{abs(hash(request.node.name)) % 10**8}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


def objects(url):
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    found = files.ls(url.removeprefix("s3://"), detail=False)
    return {path.rsplit("/", 1)[-1]: files.cat_file(path) for path in found}


def shards(found):
    return {name: data for name, data in found.items() if name.startswith("shard-")}


def test_it_holds_what_a_folder_holds_and_is_read_by_rows(bucket, tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    url = f"{bucket}/features"
    store = hl.extract(model, ROWS, ["0", "1"], url, **SMALL)
    hl.extract(model, ROWS, ["0", "1"], tmp_path / "s", **SMALL)
    assert shards(objects(url)) == {
        path.name: path.read_bytes() for path in (tmp_path / "s").glob("shard-*")
    }
    expected = model[0](ROWS).detach()
    assert torch.equal(store["0"][:], expected)
    assert torch.equal(hl.open(url, verify=True)["0"][[41, 3]], expected[[41, 3]])


def test_a_damaged_object_is_found_and_made_again(bucket):
    import s3fs

    url = f"{bucket}/features"
    hl.extract(nn.Identity(), ROWS, "", url, **SMALL)
    whole = objects(url)
    path = f"{url}/shard-00000007.safetensors"
    damaged = bytearray(whole["shard-00000007.safetensors"])
    damaged[-3] ^= 8
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(path, bytes(damaged))
    with pytest.raises(hl.FolderError, match="shard-00000007"):
        hl.open(url, verify=True)
    with pytest.warns(hl.HooklineWarning, match="damaged shards? .* made again"):
        hl.extract(nn.Identity(), ROWS, "", url, **SMALL)
    assert shards(objects(url)) == shards(whole)


class Killed(torch.utils.data.Dataset):
    """Kills its process at one item, at the first start."""

    def __init__(self, at, parent):
        self.at, self.parent = at, parent

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        if index == self.at and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return ROWS[index]


@pytest.mark.parametrize("at", tries([9, 40], gate=[40]))
def test_killed_and_started_again_it_is_whole(bucket, at):
    data = Killed(at, os.getpid())
    hl.extract(nn.Identity(), Killed(None, 0), "", f"{bucket}/whole", **SMALL)
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        try:
            import fsspec

            fsspec.asyn.reset_lock()  # the parent's loop does not run here
            hl.extract(nn.Identity(), data, "", f"{bucket}/killed", **SMALL)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    n_before = len(shards(objects(f"{bucket}/killed")))
    assert 0 < n_before < N_SHARDS
    hl.extract(nn.Identity(), data, "", f"{bucket}/killed", **SMALL)
    assert shards(objects(f"{bucket}/killed")) == shards(objects(f"{bucket}/whole"))


def test_a_server_that_is_gone_is_an_error_that_says_so(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(hl.FolderError, match=r"s3://.* cannot be (used|read)"):
            hl.extract(nn.Identity(), ROWS, "", f"{bucket}/features", **SMALL)
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def recorded(number):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.record(model, "*", copy=True) as run:
        for k in range(2):
            model(torch.full((50,), float(number + k)))
    return run


def test_a_recording_is_saved_opened_and_replaced(bucket, tmp_path):
    url = f"{bucket}/run"
    assert recorded(1).save(url) == url
    opened, local = hl.open(url, verify=True), hl.open(recorded(1).save(tmp_path / "run"))
    assert list(opened) == list(local)
    assert all(torch.equal(opened[key], local[key]) for key in local)
    value = opened.passes[0]["1"]
    assert opened.passes[0]["1"] is value
    assert opened.passes[0].outline("1").shape == (50,)
    value.zero_()
    with pytest.raises(hl.OverwrittenError):
        opened.passes[0]["1"]
    opened.release()
    assert opened.passes[0]["1"][0] == 1
    recorded(5).save(url)
    assert hl.open(url).stack("0")[:, 0].tolist() == [5, 6]
    assert len(objects(url)) == 2  # the manifest, and the values that it names
    opened.release()
    with pytest.raises(hl.FolderError, match="replaced since it was opened"):
        opened.passes[0]["0"]


def test_a_damaged_recording_is_found(bucket):
    import s3fs

    url = recorded(1).save(f"{bucket}/run")
    (name,) = set(objects(url)) - {"manifest.json"}
    data = bytearray(objects(url)[name])
    data[-3] ^= 8
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{url}/{name}", bytes(data))
    with pytest.raises(hl.FolderError, match=r"values-.* is damaged: a checksum must be"):
        hl.open(url, verify=True)


def test_files_of_others_are_not_replaced(bucket):
    import s3fs

    url = f"{bucket}/app"
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{url}/thesis.txt", b"years of work")
    with pytest.raises(hl.FolderError, match=r"holds other files \(thesis.txt\)"):
        recorded(1).save(url)
    with pytest.raises(hl.FolderError, match=r"is not a recording, a store or a run: it has no"):
        hl.open(url)
    assert set(objects(url)) == {"thesis.txt"}


def test_two_recordings_at_one_url_leave_one_whole(bucket):
    url = f"{bucket}/run"
    threads = [threading.Thread(target=recorded(k).save, args=(url,)) for k in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hl.open(url, verify=True).stack("0")[:, 0].tolist() in ([1, 2], [5, 6])


def test_a_recording_is_not_saved_to_a_server_that_is_gone(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        for use in (recorded(1).save, hl.open):
            with pytest.raises(hl.FolderError, match=r"s3://.* cannot be (used|read)"):
                use(f"{bucket}/run")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
