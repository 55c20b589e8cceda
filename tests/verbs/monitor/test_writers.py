"""Reports in the files of real loggers, read back by the loggers' own readers."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import struct
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hookline as hl
from forked_children import child, told_by
from hookline.models.torchvision_import import import_torchvision

# Each has a warning or two of its own, about names that it uses itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def train(to, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, ["1", "2.weight"], to=to, **options) as seen:
        for k in range(steps):
            optimizer.zero_grad()
            x = torch.ones(3, 4) if k != 1 else torch.full((3, 4), math.nan)
            model(x).sum().backward()
            if k != 1:  # the weights stay finite
                optimizer.step()
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.0)
                optimizer.param_groups[0]["lr"] = 0.0
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1
                torch.nn.init.constant_(model[2].weight, 0.1)
    return seen


def assert_equal(found, seen, steps=(0, 1, 2)):
    """What a reader found, by step and name, is what the curves have."""
    for step in steps:
        expected = seen.at(step)
        assert found[step].keys() == expected.keys()
        for name, number in expected.items():
            same = found[step][name]
            assert same == pytest.approx(number, rel=1e-6, nan_ok=True), (step, name)
    assert math.isnan(found[1]["1/mean"])
    assert found[1]["1/non_finite"] > 0


def test_json_lines(tmp_path):
    seen = train(tmp_path / "new" / "run.JSONL")  # no folder of that name
    lines = [json.loads(one) for one in (tmp_path / "new" / "run.JSONL").read_text().splitlines()]
    assert [one.pop("step") for one in lines] == [0, 1, 2]
    assert [one.pop("seconds") for one in lines] == seen.seconds.tolist()
    assert_equal(lines, seen)


def test_a_number_after_the_step_is_a_line_of_its_own(tmp_path):
    model, calls = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    to = [tmp_path / "run.jsonl", lambda step, numbers: calls.append((step, "logged/x" in numbers))]
    with hl.monitor(model, ports="output", to=to) as seen:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            seen.log(x=1.0)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["step"], "logged/x" in line) for line in lines] == calls
    assert calls == [(0, False), (0, True), (1, False), (1, True)]


def test_parquet(tmp_path):
    from pyarrow import parquet

    seen = train(tmp_path / "run.parquet")
    found = [{}, {}, {}]
    for row in parquet.read_table(tmp_path / "run.parquet").to_pylist():
        found[row["step"]][f"{row['site']}/{row['name']}"] = row["number"]
    assert_equal(found, seen)


def test_parquet_keeps_the_site_apart_from_any_name(tmp_path):
    from pyarrow import parquet

    class Share:
        def start(self, value):
            return torch.zeros(2, dtype=torch.float64)

        def update(self, slots, value):
            return slots + torch.stack([(value > 0).sum(), torch.tensor(value.numel())])

        def merge(self, slots, other):
            return slots + other

        def result(self, slots):
            return {"positive/all": float(slots[0] / slots[1])}

    seen = train(tmp_path / "run.parquet", steps=1, stats=Share())
    rows = parquet.read_table(tmp_path / "run.parquet").to_pylist()
    assert {row["site"] for row in rows if row["name"] == "positive/all"} == set(seen.sites)
    assert {row["name"] for row in rows} == {"positive/all", "ratio"}


def test_tensorboard_gets_one_summary_a_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    seen = train(writer)
    writer.close()
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    reader.Reload()
    found = [{}, {}, {}]
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            found[event.step][tag] = event.value
    assert_equal(found, seen)


def test_tensorboard_gets_histograms_as_its_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    values = torch.tensor([[-3.0, 0.0, 0.0, 1.0, 1.5, 2.0, 1e12, math.nan]])
    with SummaryWriter(str(tmp_path)) as writer:
        model = nn.Sequential(nn.Identity())
        with hl.monitor(model, "0", ports="output", stats=hl.stats.histogram(), to=writer):
            model(values)
            model(values * math.nan)
    reader = EventAccumulator(str(tmp_path)).Reload()
    (found,) = reader.Histograms("0/histogram")
    histogram = found.histogram_value
    assert (found.step, histogram.num) == (0, 7)
    assert (histogram.min, histogram.max) == (-3, torch.tensor(1e12).item())
    filled = {at: n for at, n in zip(histogram.bucket_limit, histogram.bucket, strict=True) if n}
    assert filled == {-2.0: 1, 0.0: 2, 2.0: 2, 4.0: 1, sys.float_info.max: 1}
    # The sum is of the middles of the buckets, and of the greatest where the last has no end.
    assert histogram.sum - histogram.max == pytest.approx(-3 + 2 * 1.5 + 3, abs=0.01)
    assert [one.step for one in reader.Scalars("0/non_finite")] == [0, 1]


def test_tensorboard_that_was_closed_is_said_once(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    writer.close()
    with pytest.warns(hl.HooklineWarning) as told:
        seen = train(writer)
    texts = [str(one.message) for one in told]
    assert "TensorBoard raised RuntimeError: the SummaryWriter is closed" in texts[0]
    assert "3 reports never reached TensorBoard" in texts[1]
    assert len(told) == 2
    assert len(seen) == 3


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path),
                        "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return pytest.importorskip("wandb")


def rows_of(folder):
    """The rows of an offline run: W&B's own records, in a log of LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # no record begins so near to the end of a block
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return rows


@pytest.mark.slow
@pytest.mark.processes
def test_wandb_gets_one_row_a_step(wandb, tmp_path):
    run = wandb.init(dir=tmp_path, settings=wandb.Settings(x_disable_stats=True))
    seen = train(run)
    run.finish()
    wandb.teardown()  # its service has written the file when it has ended
    rows = [row for row in rows_of(tmp_path) if "hookline/step" in row]
    assert [row["hookline/step"] for row in rows] == [0, 1, 2]
    found = [
        {
            name.removeprefix("hookline/"): float(number)
            for name, number in row.items()
            if name.startswith("hookline/") and name != "hookline/step"
        }
        for row in rows
    ]
    assert_equal(found, seen)


@pytest.mark.slow
@pytest.mark.processes
def test_wandb_gets_histograms_as_its_own(wandb, tmp_path):
    run = wandb.init(dir=tmp_path, settings=wandb.Settings(x_disable_stats=True))
    model = nn.Sequential(nn.Identity())
    values = torch.tensor([[-3.0, 0.0, 0.0, 1.0, 1.5, 2.0, 1e12, math.nan]])
    with hl.monitor(model, "0", ports="output", stats=hl.stats.histogram(), to=run):
        model(values)
        model(values * math.nan)
    run.finish()
    wandb.teardown()
    first, second = (row for row in rows_of(tmp_path) if "hookline/step" in row)
    found = {name: first[f"hookline/0/histogram.{name}"] for name in ("_type", "values", "bins")}
    assert found["_type"] == "histogram"
    assert sum(found["values"]) == 7
    assert found["bins"][0] <= -3
    assert found["bins"][-1] == torch.tensor(1e12).item()
    assert len(found["bins"]) == len(found["values"]) + 1
    assert sorted(found["bins"]) == found["bins"]
    assert not any("histogram" in name for name in second)


@pytest.mark.slow
@pytest.mark.processes
def test_wandb_keeps_what_the_user_logs(wandb, tmp_path):
    run = wandb.init(dir=tmp_path, settings=wandb.Settings(x_disable_stats=True))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.monitor(model, to=wandb, ports="output"):
        for k in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.log({"loss": k}, step=k)
    run.finish()
    wandb.teardown()  # its service has written the file when it has ended
    rows = rows_of(tmp_path)
    assert [row["loss"] for row in rows if "loss" in row] == [0, 1, 2, 3]
    assert [row["hookline/step"] for row in rows if "hookline/step" in row] == [0, 1, 2, 3]


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("training")
    return mlflow


@pytest.mark.slow
@pytest.mark.processes
def test_mlflow_gets_one_batch_a_step(mlflow):
    with mlflow.start_run() as run:
        seen = train(mlflow)
    client = mlflow.MlflowClient()
    found = [{}, {}, {}]
    for name in client.get_run(run.info.run_id).data.metrics:
        for one in client.get_metric_history(run.info.run_id, name):
            found[one.step][name] = one.value
    assert_equal(found, seen)


@pytest.mark.slow
@pytest.mark.processes
def test_mlflow_gets_each_metric_once_after_a_failed_batch(mlflow, monkeypatch):
    from hookline.verbs.monitor.writers import mlflow as mlflow_writer

    n_calls, log_batch = [], mlflow.MlflowClient.log_batch

    def unsteady(self, *args, **options):
        n_calls.append(1)
        if len(n_calls) == 2:
            raise OSError("the server is away")
        log_batch(self, *args, **options)

    monkeypatch.setattr(mlflow_writer, "_MOST_METRICS", 5)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", unsteady)
    with mlflow.start_run() as run, pytest.warns(hl.HooklineWarning, match="server is away"):
        seen = train(mlflow)
    client = mlflow.MlflowClient()
    for name in client.get_run(run.info.run_id).data.metrics:
        steps = [one.step for one in client.get_metric_history(run.info.run_id, name)]
        assert steps == [step for step in range(3) if name in seen.at(step)]


@pytest.mark.slow
def test_any_logger_of_lightning(tmp_path):
    import_torchvision()  # which Lightning imports
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    seen = train(logger)
    import csv

    (file,) = tmp_path.rglob("metrics.csv")
    found = [
        {name: float(number) for name, number in row.items() if name != "step" and number}
        for row in csv.DictReader(file.open())
    ]
    assert_equal(found, seen)


@pytest.mark.slow
def test_lightnings_tensorboard_gets_one_summary_a_step(tmp_path):
    import_torchvision()  # which Lightning imports
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    seen = train(logger)
    reader = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0})
    reader.Reload()
    assert [one.step for one in reader.Scalars("1/mean")] == seen.steps.tolist()
    logger.experiment.close()


@pytest.mark.slow
def test_lightnings_tensorboard_is_opened_again(tmp_path):
    import_torchvision()  # which Lightning imports
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    _ = logger.experiment
    logger.finalize("success")  # as at the end of a fit
    seen = train(logger)
    logger.finalize("success")
    reader = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload()
    found = [{}, {}, {}]
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            found[event.step][tag] = event.value
    assert_equal(found, seen)


def test_a_function_and_an_object_with_three_methods():
    said = []

    class Mine:
        def start(self, first):
            said.append(("start", first.step))

        def write(self, report):
            said.append((report.step, len(report.numbers())))

        def close(self):
            said.append("close")

    numbers = {}
    seen = train([Mine(), lambda step, found: numbers.update({step: found})])
    n = len(seen.at(0))
    assert said == [("start", 0), (0, n), (1, n), (2, n), "close"]
    assert_equal(numbers, seen)


def test_a_logger_that_raises_gets_the_reports_later():
    class Down:
        name = "a server"
        is_down = True

        def start(self, first):
            pass

        def write(self, report):
            if self.is_down and report.step < 2:
                self.is_down = report.step == 0 and len(tried) < 2
                tried.append(report.step)
                raise ConnectionError("refused")
            got.append(report.step)

        def close(self):
            pass

    got, tried = [], []
    with pytest.warns(hl.HooklineWarning, match="a server raised ConnectionError: refused") as told:
        train(Down())
    assert len(told) == 1
    assert got == [0, 1, 2]


@contextmanager
def full_disk(n_bytes):
    """Let no file of this process grow beyond a size: writing more raises an OSError."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("name", ["run", "run.jsonl"])
def test_a_full_disk_is_said_once_and_whole_reports_stay(tmp_path, name):
    path = tmp_path / name
    with pytest.warns(hl.HooklineWarning) as told, full_disk(4_000):
        seen = train(path, steps=12)
    assert "raised OSError" in str(told[0].message)
    assert "reports never reached" in str(told[1].message)
    assert len(told) == 2
    assert len(seen) == 12
    if name == "run":
        steps = hl.open(path).steps.tolist()
    else:
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(len(steps)))
    assert 1 <= len(steps) < 12


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("n_bytes", [0, 4, 200, 1_500])
def test_a_run_has_every_report_when_the_disk_has_space_again(tmp_path, n_bytes):
    limit = full_disk(n_bytes)

    class Disk:
        start = close = lambda self, *_: None

        def write(self, report):
            if report.step == 0:
                limit.__enter__()
            elif report.step == 4:
                limit.__exit__(None, None, None)

    with pytest.warns(hl.HooklineWarning, match="raised OSError") as told:
        seen = train([Disk(), tmp_path / "run"], steps=6)
    assert len(told) == 1
    found = hl.open(tmp_path / "run")
    assert found.steps.tolist() == seen.steps.tolist() == list(range(6))


@pytest.mark.parametrize("name", ["run", "run.jsonl", "run.parquet"])
def test_a_relative_path_is_of_the_folder_where_it_was_given(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    model = nn.Linear(2, 2)
    with hl.monitor(model, to=name):
        monkeypatch.chdir(tmp_path / "other")
        model(torch.ones(1, 2))
    assert os.listdir() == []
    monkeypatch.chdir(tmp_path)
    if name == "run":
        curves = hl.open(name)
        monkeypatch.chdir(tmp_path / "other")
        assert curves.steps.tolist() == [0]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted")
@pytest.mark.parametrize("name", ["run", "run.jsonl", "run.parquet"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_file_that_is_deleted_in_the_training_is_said(tmp_path, name, is_moved):
    folder = tmp_path / "runs"

    def goes(step, numbers):
        if step == 1:
            folder.rename(tmp_path / "moved") if is_moved else shutil.rmtree(folder)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen = train([folder / name, goes], steps=4)
    texts = [str(one.message) for one in told if one.category is hl.HooklineWarning]
    assert len(seen) == 4
    if is_moved and name == "run":
        assert not texts
        assert hl.open(tmp_path / "moved" / name).steps.tolist() == [0, 1, 2, 3]
    elif is_moved and name == "run.jsonl":
        assert not texts
        assert len((tmp_path / "moved" / name).read_text().splitlines()) == 4
    else:
        assert "while the monitor wrote to it" in texts[0]
        assert name in texts[0]


def test_two_monitors_on_one_folder_do_not_mix(tmp_path):
    one, other = nn.Linear(4, 4), nn.ReLU()
    with pytest.warns(hl.HooklineWarning) as told:
        with hl.monitor(other, to=tmp_path), hl.monitor(one, to=tmp_path) as seen:
            for _ in range(3):
                one(torch.ones(2, 4))
                one(torch.ones(2, 4))
                other(torch.ones(2, 4))
    assert "must be of one run, got another" in str(told[0].message)
    assert "3 reports never reached" in str(told[1].message)
    assert hl.open(tmp_path).steps.tolist() == seen.steps.tolist()
    assert hl.open(tmp_path).sites == seen.sites


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("n_bytes", [0, 3, 2_000])
def test_a_parquet_file_has_each_row_once_after_a_full_disk(tmp_path, monkeypatch, n_bytes):
    from pyarrow import parquet

    monkeypatch.setattr("hookline.verbs.monitor.writers.parquet._GROUP_ROWS", 10)
    limit = full_disk(n_bytes)

    def disk(step, numbers):
        if step == 0:
            limit.__enter__()
        elif step == 6:
            limit.__exit__(None, None, None)

    with pytest.warns(hl.HooklineWarning, match="raised OSError") as told:
        seen = train([disk, tmp_path / "run.parquet"], steps=8)
    assert len(told) == 1
    rows = parquet.read_table(tmp_path / "run.parquet").to_pylist()
    names = [(row["step"], f"{row['site']}/{row['name']}") for row in rows]
    assert names == [(step, name) for step in range(8) for name in seen.at(step)]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_parquet_file_without_its_end_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("hookline.verbs.monitor.writers.parquet._GROUP_ROWS", 10)
    with pytest.warns(hl.HooklineWarning) as told, full_disk(2_000):
        train(tmp_path / "run.parquet", steps=8)
    assert "raised OSError" in str(told[0].message)
    assert "cannot be read, for its end could not be written" in str(told[1].message)
    assert "tries again" not in str(told[1].message)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    from hookline.verbs.monitor.writers import parquet as parquet_writer

    monkeypatch.setattr(parquet_writer, "find_spec", lambda name: None)
    with pytest.raises(hl.AttachError, match=r"must have pyarrow, .*\nRun in .*pip install"):
        train(tmp_path / "run.parquet")


def test_a_result_that_raises_leaves_the_other_numbers(tmp_path):
    class Raises:
        def start(self, value):
            return torch.zeros(1, dtype=torch.float64)

        def update(self, slots, value):
            return slots

        merge = update

        def result(self, slots):
            raise ValueError("no idea")

    got = {}
    with pytest.warns(hl.HooklineWarning, match="numbers of Raises at 1 are left out: Val") as told:
        seen = train(got.__setitem__, stats=[Raises(), hl.stats.moments()])
    assert len(told) == 1
    assert_equal(got, seen)
    with pytest.raises(ValueError, match="no idea"):
        _ = seen["1"].results


def test_numbers_that_were_written_are_not_kept():
    seen = train(lambda step, numbers: None)
    assert not any(report._numbers for report in seen._source.read())


@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet", "run"])
def test_an_existing_file_or_folder_is_refused(tmp_path, name):
    path = tmp_path / name
    if path.suffix:
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    with pytest.raises(hl.FolderError, match=r"must be (empty|a new file), got"):
        train(path)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["run.csv", "v1.5.JSON"])
def test_a_file_of_another_ending_is_refused(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(hl.AttachError) as caught:
        train(path)
    assert str(caught.value) == (
        f"to= must be a folder, or a file that ends in .jsonl or .parquet, got {str(path)!r}."
        f"\nGive to={str(path.with_suffix('.jsonl'))!r}, or a folder:"
        f" to={str(path.with_suffix(''))!r}."
    )
    assert not os.listdir(tmp_path)


def test_the_name_of_a_folder_may_have_a_dot(tmp_path):
    train(tmp_path / "resnet50.a1_in1k")
    (tmp_path / "old.csv").mkdir()
    train(tmp_path / "old.csv")
    assert all(len(hl.open(folder)) for folder in tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["run", "run.jsonl", "run.parquet", "tensorboard"])
def test_a_forked_child_writes_nothing_and_says_so_once(tmp_path, name):
    from torch.utils.tensorboard import SummaryWriter

    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    to = SummaryWriter(tmp_path / name) if name == "tensorboard" else tmp_path / name
    line = hl.monitor(model, to=to)

    def step():
        model(x).sum().backward()
        optimizer.step()

    def run():
        for _ in range(20):
            step()
        line.remove()

    def action():
        nonlocal line
        told, steps = told_by(run), line.curves.steps.tolist()
        del line
        gc.collect()  # pyarrow ends the file of a writer that is let go of
        return told, steps

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    step()
    step()
    if name == "tensorboard":
        to.flush()
    before = files()
    assert before
    told, steps = child(action)
    assert ["a forked process" in one for one in told] == [True]
    assert steps == [*range(22)]
    assert files() == before
    step()
    line.remove()
    if name == "tensorboard":
        to.close()
    assert files() != before
    assert line.curves.steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["run", "run.jsonl"])
def test_a_place_that_cannot_be_made_says_what_to_give(tmp_path, name):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "sub" / name
    with pytest.raises(hl.FolderError) as caught, hl.monitor(nn.Linear(1, 1), to=place):
        pass
    fix = {
        "run": "Give to= a folder that you may write, such as to='runs/1'.",
        "run.jsonl": "Give to= a file in a folder that you may write, such as to='runs/1.jsonl'.",
    }[name]
    assert str(caught.value) == f"{place} cannot be written: Not a directory.\n{fix}"
