"""Operations of models of transformers: all own calls against an oracle, the parts of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import hookline as hl
from hookline.engine.function_names import functions_by_name, selector_name
from tiny_transformers import tiny

pytest.importorskip("transformers")

IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
RANDOM = {"empty", "empty_like", "new_empty"}


class _Oracle(TorchFunctionMode):
    """Keep the outputs of all calls, by the module that runs, which hooks on all modules tell."""

    def __init__(self, model):
        super().__init__()
        self.values: dict[str, list[object]] = {}
        self.stack: list[str] = []
        self.handles = []
        for path, module in model.named_modules():
            self.handles += [
                module.register_forward_pre_hook(lambda m, args, path=path: self._enter(path)),
                module.register_forward_hook(lambda m, args, out: self._leave()),
            ]

    def _enter(self, path):
        self.stack.append(path)

    def _leave(self):
        self.stack.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = selector_name(func)
        if any(func is function for function in functions_by_name().get(name, ())):
            kept = output.detach().clone() if isinstance(output, Tensor) else None
            self.values.setdefault(f"{self.stack[-1]}@{name}", []).append(kept)
        return output


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "gptoss"])
def test_every_own_call_is_that_of_an_oracle(name):
    model = tiny(name)
    bare = model(IDS, attention_mask=MASK).logits
    oracle = _Oracle(model)
    with oracle:
        model(IDS, attention_mask=MASK)
    for handle in oracle.handles:
        handle.remove()
    assert len(oracle.values) > 40
    with hl.record(model, list(oracle.values), copy=True) as run:
        assert torch.equal(model(IDS, attention_mask=MASK).logits, bare)
    for site, values in oracle.values.items():
        recorded = run.calls(site)
        assert len(recorded) == len(values), site
        if site.rpartition("@")[2] not in RANDOM:
            pairs = zip(values, recorded, strict=True)
            assert all(a is None or torch.equal(a, b) for a, b in pairs), site


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "gptoss"])
def test_patterns_are_those_of_eager_attention(name):
    model = tiny(name)
    bare = model(IDS, attention_mask=MASK).logits
    with hl.record(model, "**.{attn,self_attn}@{q,v,z,pattern}", copy=True) as run:
        assert torch.equal(model(IDS, attention_mask=MASK).logits, bare)
    model.set_attn_implementation("eager")
    wanted = model(IDS, attention_mask=MASK, output_attentions=True).attentions
    paths = [str(site).partition("@")[0] for site in run.sites if str(site).endswith("@pattern")]
    assert len(paths) == len(wanted) == 2
    for path, pattern in zip(paths, wanted, strict=True):
        recorded, v = run[f"{path}@pattern"], run[f"{path}@v"]
        kept = MASK[:, None, :, None].bool()  # a padded query has no key, and is 0 or uniform
        assert torch.allclose(recorded * kept, pattern * kept, atol=1e-6)
        v = v.repeat_interleave(4 // v.shape[1], 1)
        assert torch.allclose(recorded @ v, run[f"{path}@z"], atol=1e-6)


@torch.no_grad()
def test_each_step_of_generate_shows_all_heads():
    model = tiny("llama")
    options = {"attention_mask": MASK, "max_new_tokens": 3, "do_sample": False}
    bare = model.generate(IDS, **options)
    path = "model.layers.1.self_attn"
    with hl.record(model, f"{path}@{{q,pattern,z}}") as run:
        assert torch.equal(model.generate(IDS, **options), bare)
    shapes = [tuple(step[f"{path}@pattern"].shape) for step in run.passes]
    assert shapes == [(2, 4, 7, 7), (2, 4, 1, 8), (2, 4, 1, 9)]
    assert {tuple(step[f"{path}@q"].shape) for step in run.passes[1:]} == {(2, 4, 1, 8)}


@torch.no_grad()
@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parts_in_one_graph_are_the_eager_ones(name):
    model = tiny(name)
    sites = [
        f"{path}@{part}"
        for path, module in model.named_modules() if type(module).__name__.endswith("Attention")
        for part in ("q", "k", "v", "z", "pattern")
    ]  # fmt: skip
    with hl.record(model, sites, copy=True) as eager:
        model(IDS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.record(model, sites, copy=True) as run:
        compiled(IDS)
    for site in sites:
        first, second = eager[site], run[site]
        if first.shape != second.shape:  # keys that the model repeats in graphs alone
            first = first.repeat_interleave(second.shape[1] // first.shape[1], 1)
        assert torch.equal(first, second), site


KERNEL = (
    r"flex_attention computes this attention(.|\n)*module itself, 'model\.layers\.0\.self_attn'"
)


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")
def test_a_compiled_kernel_of_its_own_is_refused_by_name():
    model = tiny("llama")
    model.set_attn_implementation("flex_attention")
    with hl.record(model, "model.layers.0.self_attn@pattern"), torch.no_grad():
        with pytest.raises(hl.AttachError, match=KERNEL):
            model(IDS)
