"""hl.edits.patch: values of another run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hookline as hl
from tiny_transformers import tiny

IDS, OTHER = torch.randint(3, 50, (2, 2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
MODELS = {
    "gpt2": "transformer.h", "llama": "model.layers", "mixtral": "model.layers",
    "qwen2moe": "model.layers", "olmoe": "model.layers", "gpt_oss": "model.layers",
}  # fmt: skip
EXPERTS = ("mixtral", "qwen2moe", "olmoe", "gpt_oss")


def recorded(model, selector, *args, **kwargs):
    with torch.no_grad(), hl.record(model, selector) as run:
        output = model(*args, **kwargs)
    return run, output


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_transformer_with_its_own_values_has_the_same_bits(name):
    model, blocks = tiny(name), MODELS[name]
    sites = [f"{blocks}.*", f"{blocks}.*.*", f"{blocks}.*:input"]
    run, clean = recorded(model, sites, IDS, attention_mask=MASK)
    with hl.edit(model, sites, hl.edits.patch(run)):
        assert torch.equal(model(IDS, attention_mask=MASK).logits, clean.logits)
    with hl.edit(model, f"{blocks}.1", hl.edits.patch(run)):  # the whole stream, at the last block
        assert torch.equal(model(OTHER, attention_mask=MASK).logits, clean.logits)
    first = f"{blocks}.0"
    with hl.edit(model, first, hl.edits.patch(run), at=-1), hl.record(model, first) as seen:
        edited = model(OTHER, attention_mask=MASK).logits
    plain = model(OTHER, attention_mask=MASK).logits
    if name in EXPERTS:  # another expert for one token: products of other sizes for the rest
        assert_close(edited[:, :-1], plain[:, :-1], rtol=0, atol=1e-6)
    else:
        assert torch.equal(edited[:, :-1], plain[:, :-1])
    assert not torch.equal(edited[:, -1], plain[:, -1])
    assert torch.equal(seen[first][:, -1], run[first][:, -1])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_generate_with_the_values_of_its_own_steps(name):
    model, site = tiny(name), f"{MODELS[name]}.1"
    options = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    with hl.record(model, site) as run:
        clean = model.generate(IDS, **options)
    with hl.edit(model, site, hl.edits.patch(run)):
        assert torch.equal(model.generate(OTHER, **options)[:, 7:], clean[:, 7:])
    with hl.edit(model, site, hl.edits.patch(run), steps=slice(2, None)):
        patched = model.generate(OTHER, **options)[:, 7:]
    assert torch.equal(patched[:, 2:], clean[:, 9:])
    assert not torch.equal(patched[:, :2], clean[:, 7:9])


@torch.no_grad()
def test_other_runs_are_refused_with_drafted_tokens():
    model, site, ids = tiny("llama"), "model.layers.1", OTHER[:1]
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": 48}
    with hl.record(model, site) as run:
        model.generate(IDS[:1], **options)
    with hl.edit(model, site, hl.edits.patch(run), at=3):  # of the prompt
        expected = model.generate(ids, **options)
    options["prompt_lookup_num_tokens"] = 1
    with hl.edit(model, site, hl.edits.patch(run), at=3):
        assert torch.equal(model.generate(ids, **options), expected)
    with hl.edit(model, site, hl.edits.patch(run), at=12):
        with pytest.raises(hl.AttachError, match=r"assisted decoding(.|\n)*slice\(prompt_length\)"):
            model.generate(ids, **options)


@torch.no_grad()
def test_a_prompt_serves_the_step_that_it_was():
    model, site = tiny("gpt2"), "transformer.h.1"
    run, _ = recorded(model, site, IDS)
    with hl.edit(model, site, hl.edits.patch(run)):
        with pytest.raises(hl.StructureError, match=r"(?s)\[2, 1, 32\].*\[2, 7, 32\].*steps=0"):
            model.generate(OTHER, max_new_tokens=2, do_sample=False)
    with hl.edit(model, site, hl.edits.patch(run), steps=0):
        first = model.generate(OTHER, max_new_tokens=2, do_sample=False)[:, 7]
    assert torch.equal(first, model.generate(IDS, max_new_tokens=1, do_sample=False)[:, 7])


class Twice(nn.Module):
    """A block that runs twice, and can fail between."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(2, 2)
        self.fails = False

    def forward(self, x):
        x = self.block(x)
        if self.fails:
            raise ValueError("on purpose")
        return self.block(x)


@pytest.fixture
def twice():
    torch.manual_seed(0)
    return Twice()


def failing(model, x):
    model.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    model.fails = False


def test_each_run_and_call_gets_its_own_value(twice):
    inputs = [torch.randn(1, 2) for _ in range(3)]
    with hl.record(twice, "block") as run:
        clean = [twice(inputs[0])]
        failing(twice, inputs[0])
        clean += [twice(x) for x in inputs[1:]]
    x = torch.zeros(1, 2)
    with hl.edit(twice, "block", hl.edits.patch(run)), hl.record(twice, "block#0") as seen:
        failing(twice, x)
        outputs = [twice(x)]
        failing(twice, x)
        outputs += [twice(x) for _ in range(2)]
        with pytest.raises(
            hl.NotRecordedError, match=r"block must be recorded in run 3 and call 0"
        ):
            twice(x)
    assert all(map(torch.equal, outputs, clean))
    firsts = [record["block#0"] for record in seen.passes if not record.failed]
    wanted = [record["block#0"] for record in run.passes if not record.failed]
    assert all(map(torch.equal, firsts, wanted))
    with hl.edit(twice, "block#1", hl.edits.patch(run.passes[3])):
        assert torch.equal(twice(x), clean[2])
        assert torch.equal(twice(x), clean[2])


def test_parts_inputs_and_gradients_are_patched(holder):
    run, _ = recorded(holder, ["inner", "inner:input"], torch.ones(2))
    with hl.edit(holder, "inner:output.pair.left", hl.edits.patch(run)):
        assert torch.equal(holder(torch.zeros(2))["pair"].left, run["inner"]["pair"].left)
    with hl.edit(holder, "inner", hl.edits.patch(run)):
        patched = holder(torch.zeros(2))
    assert torch.equal(patched["out"].hidden, run["inner"]["out"].hidden)
    assert patched["text"] == "kept"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with hl.record(model, "0:grad_output") as grads:
        (3 * model(torch.ones(1, 2))).sum().backward()
    model.zero_grad()
    with hl.edit(model, "0:grad_output", hl.edits.patch(grads)):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model[0].bias.grad, grads["0:grad_output"][0])


def test_gradients_are_those_of_their_run_in_any_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with hl.record(model, "0:grad_output") as run:
        for factor in (3, 5):
            (factor * model(torch.ones(1, 2))).sum().backward()
    model.zero_grad()
    wanted = [record["0:grad_output"] for record in run.passes]
    with hl.edit(model, "0:grad_output", hl.edits.patch(run)):
        first, second = (model(torch.ones(1, 2)).sum() for _ in range(2))
        second.backward()
        assert torch.equal(model[0].bias.grad, wanted[1][0])
        first.backward()
    assert torch.equal(model[0].bias.grad, wanted[0][0] + wanted[1][0])


def test_a_folder_and_another_dtype_serve_as_well(twice, tmp_path):
    run, _ = recorded(twice, "block", torch.ones(1, 2))
    opened = hl.open(run.save(tmp_path / "run"))
    with hl.edit(twice, "block#0", hl.edits.patch(opened)), hl.record(twice, "block#0") as seen:
        twice(torch.zeros(1, 2))
    assert torch.equal(seen["block#0"], run["block#0"])
    half = Twice().bfloat16()
    with hl.edit(half, "block#0", hl.edits.patch(run)), hl.record(half, "block#0") as seen:
        half(torch.zeros(1, 2, dtype=torch.bfloat16))
    assert torch.equal(seen["block#0"], run["block#0"].bfloat16())


def test_the_recording_is_not_written_to():
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    run, _ = recorded(model[:1], "0", torch.tensor([-1.0, 1.0]))
    with hl.edit(model, "0", hl.edits.patch(run)):
        assert model(torch.zeros(2)).tolist() == [0, 1]
        assert model(torch.zeros(2)).tolist() == [0, 1]
    assert run["0"].tolist() == [-1, 1]


def test_what_does_not_fit_is_refused(twice):
    run, _ = recorded(twice, "block", torch.ones(1, 2))
    with hl.edit(twice, "block", hl.edits.patch(run)):
        with pytest.raises(hl.StructureError) as caught:
            twice(torch.ones(3, 2))
    assert str(caught.value).startswith(
        "hl.edits.patch must put a value of the same form at block: expected Tensor[3, 2], got"
        " Tensor[1, 2].\nRecord and patch with inputs of one shape"
    )
    with pytest.raises(hl.NotRecordedError, match=r"\(root\)"):
        hl.edit(twice, "(root)", hl.edits.patch(run))
    assert not hl.inventory(twice)
    with pytest.raises(hl.AttachError, match=r"got Tensor.*\n.* hl.edits.replace\(value\)"):
        hl.edits.patch(run["block#0"])
    with pytest.raises(hl.AttachError, match=r"needs the site that it changes"):
        hl.edits.patch(run)(torch.ones(1))
    with hl.record(twice, "block") as failed:
        failing(twice, torch.ones(1, 2))
    with pytest.raises(hl.NotRecordedError, match=r"of a run that did not fail"):
        hl.edit(twice, "block", hl.edits.patch(failed))


def test_a_patch_of_one_example_under_vmap_says_what_to_do():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    run, _ = recorded(model, "0", x)
    patched = hl.edit(model, "0", hl.edits.patch(run))
    with patched, pytest.raises(hl.StructureError, match=r"Run the model on the batch, without"):
        torch.func.vmap(model)(x)
