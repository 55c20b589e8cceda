"""A monitor in a loop of Accelerate."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.models.torchvision_import import import_torchvision

import_torchvision()  # which accelerate may import
accelerate = pytest.importorskip("accelerate")

from hookline.integrations.accelerate import monitor  # noqa: E402
from processes import on_ranks, ranks_of  # noqa: E402

# A group of their own: at the end of a training, Accelerate ends the group that it is in.
ranks = pytest.fixture(scope="module")(ranks_of(2))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]


def test_accumulation_and_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=tmp_path
    )
    accelerator.init_trackers("run")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with monitor(accelerator, model) as seen:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()
    assert seen.steps.tolist() == [0, 1, 2]
    assert seen["1"].count.tolist() == [64, 64, 64]
    reader = EventAccumulator(str(next(tmp_path.rglob("events*")).parent))
    reader.Reload()
    found = [event.value for event in reader.Scalars("1/std")]
    assert found == pytest.approx(seen["1"].std.tolist())


@pytest.mark.processes
def test_the_tracker_of_mlflow_gets_names_that_it_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    accelerator = accelerate.Accelerator(cpu=True, log_with="mlflow", project_dir=tmp_path)
    accelerator.init_trackers("run")
    run_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    model = accelerator.prepare(nn.Linear(4, 2))
    with monitor(accelerator, model, ports="output") as seen:
        model(torch.ones(2, 4))
    accelerator.end_training()
    found = mlflow.MlflowClient().get_run(run_id).data.metrics
    assert found["root/mean"] == pytest.approx(seen["(root)"].mean[0])


def test_a_tracker_of_ones_own_is_logged_to():
    logged = []

    class Tracker(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only = "mine", False, True
        tracker = None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **others):
            logged.append((step, values["std"] if "std" in values else values["(root)/std"]))

    accelerator = accelerate.Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("run")
    model = accelerator.prepare(nn.Linear(4, 2))
    with monitor(accelerator, model, ports="output") as seen:
        model(torch.ones(2, 4))
    assert logged == [(0, seen["(root)"].std[0])]
    accelerator.end_training()


@on_ranks
def test_trackers_are_written_to_by_the_first_rank(rank, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in places.items():
        os.environ[name] = str(value)  # as accelerate's launcher does
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with monitor(accelerator, model, ports=("output", "grad")) as seen:
        for k in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(torch.full((3, 4), rank + k + 1.0)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            grad = model.module.weight.grad.norm().item()
            optimizer.step()
    accelerator.end_training()
    assert seen["(root)"].count.tolist() == [12, 12]
    assert seen["weight:grad"].norm[1] == pytest.approx(grad)
    files = list(folder.rglob("events*"))
    if accelerator.is_main_process:
        reader = EventAccumulator(str(files[0].parent)).Reload()
        found = [event.value for event in reader.Scalars("(root)/std")]
        assert found == pytest.approx(seen["(root)"].std.tolist())


def test_what_the_accelerator_logs_is_kept(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with monitor(accelerator, model, ports="output", to=tmp_path / "run") as seen:
        for step in range(3):
            model(torch.randn(4, 4)).sum().backward()
            accelerator.log({"loss": step, "text": "a", "grid": torch.ones(4)}, step=100 + step)
            optimizer.step()
    assert accelerator.trackers == []
    accelerator.log({"loss": 9})
    for curves in (seen, hl.open(tmp_path / "run")):
        assert list(curves.logged) == ["loss"]
        assert curves.logged["loss"].values.tolist() == [0, 1, 2]
