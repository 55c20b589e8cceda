"""Running a model on inputs of every form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.verbs.shared.model_state import in_eval_mode
from hookline.verbs.shared.run_model import call_model, unwrap_lone_tensor


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


class Counting(nn.Module):
    """A model that counts its calls and changes all that a run can change."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.fc(x)))


class TakesList(Counting):
    def forward(self, tensors):
        return [super(TakesList, self).forward(tensor) for tensor in tensors]


class TakesListLate(Counting):
    def forward(self, tensors):
        super().forward(torch.ones(3, 2))
        raise ValueError(len(tensors))


@pytest.mark.parametrize(
    ("kind", "is_tensor"), [(Counting, True), (TakesList, False), (TakesListLate, False)]
)
def test_a_list_of_one_tensor_is_the_tensor_where_lists_fail(kind, is_tensor, left_as_found):
    model, x = kind(), torch.ones(3, 2)
    before, state = left_as_found(model), torch.get_rng_state()
    with pytest.warns(hl.HooklineWarning, match="saw nothing"), hl.record(model) as run:
        inputs = unwrap_lone_tensor(model, [x])
    assert inputs is x if is_tensor else inputs == [x]
    assert len(run.passes) == model.calls == 0
    assert left_as_found(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_other_inputs_stay_as_they_are():
    model, x = Counting(), torch.ones(3, 2)
    for inputs in (x, (x,), {"x": x}, [x, x], [], [3], [[x]]):
        assert unwrap_lone_tensor(model, inputs) is inputs
    lazy = nn.LazyLinear(2)
    assert unwrap_lone_tensor(lazy, [x]) == [x]
    assert lazy.in_features == 0


def test_verbs_take_the_list_that_a_loader_makes_of_a_tensor():
    (images,) = loaded = next(iter(DataLoader(TensorDataset(torch.rand(2, 3, 8, 8)), 2)))
    assert type(loaded) is list
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert hl.summary(model, loaded).rows[1].output == "[2, 4, 6, 6]"
    assert hl.doctor(model, loaded)["0"].calls == 1
    assert torch.equal(hl.features(model, loaded, "0")["0"], hl.features(model, images, "0")["0"])
    assert torch.equal(hl.cam(model, loaded).maps, hl.cam(model, images).maps)
    with torch.device("meta"):
        large = nn.Linear(8, 4)
    assert hl.summary(large, [torch.rand(2, 8)]).rows[0].output == "[2, 4]"


@pytest.mark.parametrize(
    ("inputs", "refusal"),
    [
        (torch.ones(1), "1 argument: missing a required argument: 'mask'"),
        ((torch.ones(1),) * 3, "3 arguments: too many positional arguments"),
    ],
)
def test_arguments_that_the_forward_refuses_are_said(inputs, refusal):
    class Masked(nn.Module):
        def forward(self, x, mask):
            return x * mask

    with pytest.raises(TypeError) as caught:
        call_model(Masked(), inputs)
    assert caught.value.__notes__ == [
        f"hookline: the model's forward takes (x, mask), and refuses {refusal}."
        "\nGive its arguments as a tuple, or by name in a dict."
    ]


class ReadsTheShape(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0], -1)


@pytest.mark.parametrize("model", [nn.Linear(4, 2), ReadsTheShape()], ids=["calls", "attributes"])
def test_a_loader_in_place_of_a_batch_says_how_to_take_one(model):
    loader = DataLoader(TensorDataset(torch.zeros(6, 4)), batch_size=2)
    assert hl.summary(model, loader).failure.endswith(
        "\na DataLoader gives batches, and the model takes one batch.\nGive next(iter(loader)), or"
        " of a batch with labels next(iter(loader))[0]."
    )
    assert hl.summary(model, next(iter(loader))).failure is None
    assert hl.summary(model, iter(loader)).failure.endswith(
        "\nan iterator gives batches, and the model takes one batch.\nGive next(batches)."
    )


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [(np.zeros((6, 4)), "an array of NumPy"), ([[0.5, 1, 2, 3]], "a list of numbers")],
    ids=["array", "list"],
)
def test_numbers_in_place_of_a_tensor_say_how_to_make_one(inputs, kind):
    failure = hl.summary(nn.Linear(4, 2), inputs).failure
    note = f"\n{kind} is given in place of a tensor.\nGive torch.as_tensor(inputs)."
    assert failure.endswith(note)


@pytest.mark.parametrize("inputs", ["a text", ["a text", "another"]], ids=["text", "list"])
def test_texts_in_place_of_a_tensor_name_the_tokenizer(inputs):
    failure = hl.summary(nn.Linear(4, 2), inputs).failure
    assert "\ntext is given in place of a tensor.\nGive the tensors of a tokenizer: " in failure


def test_a_forward_that_has_no_signature_gets_no_advice():
    model = nn.Module()
    model.forward = getattr
    with pytest.raises(TypeError) as caught:
        call_model(model, torch.ones(1))
    note = "hookline: the model failed in (root) (Module), which got Tensor[1]."
    assert caught.value.__notes__ == [note]


METRIC = torch.sum
WIDE = torch.ones(2, 9)


@pytest.mark.parametrize(
    "run",
    [
        lambda model: hl.sweep(model, WIDE, {"0": hl.edits.scale(0)}, METRIC),
        lambda model: hl.attribute(model, WIDE, "0", METRIC, clean=WIDE),
        lambda model: hl.invariance(model, WIDE),
        lambda model: hl.operations(model, WIDE),
        lambda model: hl.anatomy(model, WIDE),
        lambda model: hl.features(model, WIDE, "0"),
    ],
)
def test_an_error_of_the_model_has_a_note_that_names_the_module(run):
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        run(nn.Sequential(nn.Linear(8, 3)).eval())
    note = "hookline: the model failed in 0 (Linear), which got Tensor[2, 9]."
    assert caught.value.__notes__ == [note]
