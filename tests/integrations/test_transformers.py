"""The callback for the `Trainer` of transformers, in real trainings."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline.models.packages import import_package

transformers = import_package("transformers", "the tests of its callback")
pytest.importorskip("accelerate")

from hookline.integrations.transformers import Monitor  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]


def trained(tmp_path, monitor, *, callbacks_too=(), **options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=32, n_positions=8, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=6, per_device_train_batch_size=2, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=2, **options,
    )  # fmt: skip
    ids = torch.arange(8)
    texts = [{"input_ids": ids, "labels": ids}] * 32
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=texts,
        eval_dataset=texts[:4],
        callbacks=[monitor, *callbacks_too],
    )
    trainer.train()
    return trainer


def test_steps_are_reported_when_the_trainer_logs(tmp_path):
    monitor = Monitor("transformer.h.*", ports="output", to=tmp_path / "run")
    trainer = trained(tmp_path, monitor, eval_strategy="steps", eval_steps=1)
    seen = monitor.curves
    logged = [one["step"] for one in trainer.state.log_history if "loss" in one]
    assert seen.steps.tolist() == logged == [2, 4, 6]
    assert seen["transformer.h.0"].count.tolist() == [2 * 8 * 16] * 3  # evaluation is left out
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    for curves in (seen, hl.open(tmp_path / "run")):
        assert curves.logged["loss"].steps.tolist() == logged
        assert curves.logged["loss"].values.tolist() == losses
        assert {"eval_loss", "learning_rate", "grad_norm"} <= curves.logged.keys()
        assert "train_runtime" not in curves.logged
    assert hl.open(tmp_path / "run")["transformer.h.1"].results == seen["transformer.h.1"].results
    assert not [one for one in hl.inventory(trainer.model) if "hookline" in str(one)]


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_another_logging_strategy_than_steps_is_told(tmp_path, strategy):
    monitor = Monitor("transformer.h.0", ports="output")
    with pytest.warns(
        hl.HooklineWarning, match=f"every 2 steps .*got logging_strategy='{strategy}'"
    ):
        trained(tmp_path, monitor, logging_strategy=strategy)
    assert monitor.curves.steps.tolist() == [2, 4, 6]
    monitor = Monitor("transformer.h.0", ports="output", every=3)
    trained(tmp_path, monitor, logging_strategy=strategy)  # a warning would be an error
    assert monitor.curves.steps.tolist() == [3, 6]


def test_accumulated_batches_are_one_step(tmp_path):
    monitor = Monitor("transformer.h.0", ports=("output", "grad"), every=1)
    trained(tmp_path, monitor, gradient_accumulation_steps=2)
    seen = monitor.curves
    assert seen.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert seen["transformer.h.0"].count.tolist() == [4 * 8 * 16] * 6
    assert (seen["transformer.h.0.ln_1.weight:grad"].norm > 0).all()


def test_curves_before_a_training_say_what_to_do():
    with pytest.raises(AttributeError, match=r"Call trainer.train\(\) first"):
        _ = Monitor().curves


def test_an_evaluation_on_start_is_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr("hookline.verbs.monitor.training_steps._MOST_WAITING", 3)
    monitor = Monitor("transformer.h.0", ports="output", every=1)
    trained(
        tmp_path, monitor, eval_on_start=True, eval_strategy="steps", eval_steps=3,
        per_device_eval_batch_size=1, gradient_accumulation_steps=4,
    )  # fmt: skip
    seen = monitor.curves
    assert seen.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert seen["transformer.h.0"].count.tolist() == [8 * 8 * 16] * 6


def test_one_callback_for_two_trainings_one_of_which_raised(tmp_path):
    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 4:
                raise ZeroDivisionError

    monitor = Monitor("transformer.h.0", ports="output", every=1)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, monitor, callbacks_too=[Stops()])
    assert monitor.curves.steps.tolist() == [1, 2, 3, 4]
    trainer = trained(tmp_path, monitor)
    assert monitor.curves.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert not [one for one in hl.inventory(trainer.model) if "hookline" in str(one)]
