"""Running a model on inputs of every form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.shared.run_model import in_eval_mode


class TakesOneDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, batch):
        return self.fc(batch["image"])


VERBS = {
    "features": lambda model, inputs: hl.features(model, inputs, "fc"),
    "features of batches": lambda model, inputs: hl.features(model, iter([inputs]), "fc"),
    "cam": lambda model, inputs: hl.cam(model, inputs, layer="fc", method="eigencam"),
}
NOTE = (
    "a dict is given as keyword arguments, and the model's forward refuses them: missing a required"
    " argument: 'batch'.\nGive a dict that is one argument in a tuple: ({'image': ...},)."
)


@pytest.mark.parametrize("name", VERBS)
def test_a_dict_that_the_forward_refuses_says_how_to_give_one(name):
    inputs = {"image": torch.zeros(2, 3, 4, 4)}
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        VERBS[name](TakesOneDict(), inputs)
    assert caught.value.__notes__ == [f"hookline: {NOTE}"]
    assert "hookline: a dict" not in "".join(getattr(caught.value, "args", ()))


def test_verbs_that_report_a_failure_say_how_to_give_a_dict():
    inputs = {"image": torch.zeros(2, 4)}
    assert hl.summary(TakesOneDict(), inputs).failure.endswith(f"\n{NOTE}")
    assert NOTE in hl.doctor(TakesOneDict(), inputs).failure.what
    assert hl.summary(TakesOneDict(), (inputs,)).failure is None
    assert hl.features(TakesOneDict(), (inputs,), "fc")["fc"].shape == (2, 2)


def test_a_type_error_inside_the_model_is_no_matter_of_keywords():
    class Wrong(nn.Module):
        def forward(self, x):
            return x + "a"

    with pytest.raises(TypeError) as caught:
        hl.features(Wrong(), {"x": torch.zeros(1)}, "(root)")
    assert caught.value.__notes__ == [
        "hookline: the model failed in (root) (Wrong), which got x=Tensor[1]."
    ]


def test_keys_that_are_no_names_are_refused_alike():
    with pytest.raises(TypeError) as caught:
        hl.features(TakesOneDict(), {0: torch.zeros(1), "a": 1, "b": 2, "c": 3}, "fc")
    (note,) = caught.value.__notes__
    assert note.endswith("that is one argument in a tuple: ({0: ..., 'a': ..., 'b': ..., ...},).")


@pytest.mark.parametrize("name", ["features", "features of batches"])
def test_an_input_of_the_wrong_dtype_is_said_with_the_site(name):
    model = nn.Sequential()
    model.fc = nn.Linear(4, 2)
    with pytest.raises(RuntimeError, match="dtype") as caught:
        VERBS[name](model, torch.zeros(3, 4, dtype=torch.float64))
    assert caught.value.__notes__ == [
        "hookline: the model failed in fc (Linear), which got Tensor[3, 4] float64 on cpu"
        " and has parameters of float32 on cpu."
    ]


def test_class_maps_of_the_wrong_dtype_name_the_site():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(RuntimeError, match="type") as caught:
        hl.cam(model, torch.rand(1, 3, 8, 8, dtype=torch.float64))
    assert "the model failed in 0 (Conv2d), which got Tensor[1, 3, 8, 8] float64" in str(
        caught.value.__notes__
    )


def test_an_error_of_a_hook_has_no_second_note(net, image):
    with pytest.raises(ZeroDivisionError) as caught:
        hl.features(net, image, "fc", keep=lambda t: 1 / 0)
    assert not any("the model failed" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), torch.Size([1, 3, 8, 8])])
def test_a_shape_in_the_place_of_a_tensor_is_said(net, shape):
    said = hl.summary(net, shape).failure
    assert said.endswith("\nGive torch.rand(1, 3, 8, 8) for an input of this shape.")
    assert "hookline" not in hl.summary(net, (torch.zeros(1, 3, 8, 8), 3)).failure


@pytest.mark.compiles
@pytest.mark.parametrize("is_inference", [False, True])
def test_the_buffers_of_a_compiled_model_are_written_back(fresh_dynamo, is_inference):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(2))

        def forward(self, x):
            self.n += 1
            return x + self.n

    with torch.inference_mode(is_inference):
        model = Counts()
        model.compile(backend="eager")
        model(torch.zeros(2))
        buffer = model.n
        assert hl.summary(model, torch.zeros(2)).failure is None
    assert model.n is buffer
    assert model.n.tolist() == [1, 1]


def test_modules_stay_in_eval_mode_until_the_last_thread_ends():
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2).eval())
    first, second = in_eval_mode(model.modules()), in_eval_mode(model.modules())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == [False, False, False]
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == [True, True, False]
