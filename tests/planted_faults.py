"""Planted faults in recordings: what is broken, in which model, and where it must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hookline as hl
from healthy_models import N_TOKENS, PORTS, WIDTH, build, inputs_of, record

Plant = Callable[[nn.Module], Any]


class Block(nn.Module):
    """A block of a transformer with its parts as modules, some of which can be broken."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.softmax = nn.Softmax(-1)
        self.up, self.act, self.down = (
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )
        self.broken = ""

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / (1.0 if self.broken == "scale" else q.shape[-1] ** 0.5)
        weights = self.softmax(scores * (60.0 if self.broken == "scale" else 1.0))
        if self.broken == "log":
            weights = weights / (weights.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True))
        h = self.out((weights @ v).transpose(1, 2).flatten(2))
        if self.broken == "detach":
            x = (x + h).detach()
            h = 0.0
        if self.broken == "detach branch":
            h = h.detach()
        x = x + h
        if self.broken == "skips mlp":
            return x
        h = self.norm2(x)
        if self.broken == "cast":
            return x + self.down(self.act(self.up(h).to(torch.bfloat16)).float())
        h = self.down(self.act(self.up(h)))
        if self.broken == "no residual":
            return h * 1e-3
        return x + h


class Net(nn.Module):
    """A transformer of such blocks."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pair(nn.Module):
    """Returns two tensors, of which the second can be broken."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.fc, self.broken = nn.Linear(WIDTH, WIDTH), broken

    def forward(self, x):
        h = self.fc(x)
        return h, (h * float("nan") if self.broken else h.square())


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Pair(k == 2) for k in range(4))

    def forward(self, x):
        for part in self.parts:
            x, _ = part(x)
        return x


class Root(nn.Module):
    """A square root, whose gradient at 0 is infinite."""

    def forward(self, x):
        return x.sqrt()


def _roots() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), Root(), nn.Linear(WIDTH, 10))


def _residual(depth: int = 12, scale: float = 2.0) -> nn.Module:
    """A stack of residual blocks without norms, which doubles the spread in each block."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)
            nn.init.normal_(self.fc.weight, std=scale / WIDTH**0.5)

        def forward(self, x):
            return x + self.fc(x)

    return nn.Sequential(*(Residual() for _ in range(depth)))


def _sigmoids(depth: int = 12) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


class Tower(nn.Module):
    """LSTMs, each of which returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        cells = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.cells, self.head = nn.ModuleList(cells), nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = x[:, None].expand(-1, 5, -1)
        for cell in self.cells:
            x, _ = cell(x)
        return self.head(x)


_OWN: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "pairs": Pairs,
    "roots": _roots,
    "residual": _residual,
    "sigmoids": _sigmoids,
    "tower": Tower,
}


@dataclass(frozen=True)
class Fault:
    """A fault that is planted into a model.

    Args:
        name: what is broken.
        model: the family, or one of the models here.
        plant: breaks the model; what it returns, if anything, takes its place.
        sites: the paths that name the fault; the first finding must be at one of them.
        kinds: the kinds of finding that name it.
        held_out: whether thresholds were never looked at with it.
        dtype: the dtype of the run.
    """

    name: str
    model: str
    plant: Plant
    sites: tuple[str, ...]
    kinds: tuple[str, ...]
    held_out: bool = False
    dtype: torch.dtype = torch.float32
    variant: str = "eval"

    def run(self) -> hl.Recording:
        """Record the broken model."""
        if self.model in _OWN:
            torch.manual_seed(0)
            model = _OWN[self.model]().eval()
            inputs: Any = torch.randn(16, WIDTH)
            if self.model == "net":
                torch.manual_seed(2)
                inputs = {"input_ids": torch.randint(3, 100, (2, N_TOKENS))}
        else:
            model, inputs = build(self.model, self.variant), inputs_of(self.model, self.dtype)
        model = model.to(self.dtype)
        torch.manual_seed(3)
        with torch.no_grad():
            planted = self.plant(model)
        model = planted if isinstance(planted, nn.Module) else model
        return record(model, inputs, PORTS)

    def is_named(self, findings: hl.Findings) -> bool:
        """Tell whether the first finding names the fault at its site."""
        if not findings:
            return False
        first = findings[0]
        path = first.site.split(":")[0].split("#")[0]
        return path in self.sites and first.kind in self.kinds


def times(path: str, factor: float) -> Plant:
    def plant(model):
        module = model.get_submodule(path)
        for parameter in module.parameters(recurse=False):
            parameter.mul_(factor)

    return plant


def zero(*paths: str) -> Plant:
    def plant(model):
        for path in paths:
            for parameter in model.get_submodule(path).parameters():
                parameter.zero_()

    return plant


def bias(path: str, number: float) -> Plant:
    return lambda model: [model.get_submodule(path).bias.fill_(number)]


def element(path: str, number: float, name: str = "weight") -> Plant:
    def plant(model):
        getattr(model.get_submodule(path), name).view(-1)[7] = number

    return plant


def rows(path: str, start: int, stop: int) -> Plant:
    def plant(model):
        module = model.get_submodule(path)
        module.weight[start:stop] = 0.0
        if module.bias is not None:
            module.bias[start:stop] = 0.0

    return plant


def small_from(pattern: str, first: int, last: int, factor: float) -> Plant:
    """Scale the linear layers of all blocks from one on."""

    def plant(model):
        for k in range(first, last):
            for module in model.get_submodule(pattern.format(k)).modules():
                if isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D":
                    for parameter in module.parameters():
                        parameter.mul_(factor)

    return plant


def replaced(path: str, module: Callable[[], nn.Module]) -> Plant:
    return lambda model: model.set_submodule(path, module()) or None


def broken(path: str, how: str) -> Plant:
    def plant(model):
        model.get_submodule(path).broken = how

    return plant


def tied(container: str, k: int, source: int) -> Plant:
    def plant(model):
        blocks = model.get_submodule(container)
        blocks[k] = blocks[source]

    return plant


def both(*plants: Plant) -> Plant:
    def plant(model):
        for part in plants:
            part(model)

    return plant


def same_weights(path: str, other: str) -> Plant:
    def plant(model):
        model.get_submodule(path).load_state_dict(model.get_submodule(other).state_dict())

    return plant


def frozen(path: str) -> Plant:
    return lambda model: model.get_submodule(path).requires_grad_(False) and None


GROWS, SHRINKS = ("exploding",), ("vanishing",)

FAULTS: list[Fault] = [
    Fault(
        "zeroed MLP layer",
        "gpt2",
        zero("transformer.h.2.mlp.c_proj"),
        ("transformer.h.2.mlp.c_proj",),
        ("dead",),
    ),
    Fault(
        "zeroed projection",
        "llama",
        zero("model.layers.3.self_attn.o_proj"),
        ("model.layers.3.self_attn.o_proj",),
        ("dead",),
    ),
    Fault("zeroed convolution", "resnet", zero("layer2.1.conv1"), ("layer2.1.conv1",), ("dead",)),
    Fault("zeroed batch norm", "resnet", zero("layer1.1.bn2"), ("layer1.1.bn2",), ("dead",), True),
    Fault("zeroed embedding", "net", zero("embed"), ("embed",), ("dead",), True),
    Fault(
        "x100 init of one MLP layer",
        "gpt2",
        times("transformer.h.3.mlp.c_fc", 100),
        ("transformer.h.3.mlp.c_fc",),
        GROWS,
    ),
    Fault(
        "x100 init of the first block's MLP",
        "llama",
        times("model.layers.0.mlp.up_proj", 100),
        ("model.layers.0.mlp.up_proj",),
        GROWS,
    ),
    Fault(
        "x100 init of the last block's MLP",
        "bert",
        times("bert.encoder.layer.5.output.dense", 100),
        ("bert.encoder.layer.5.output.dense",),
        GROWS,
    ),
    Fault("x100 init of a plain layer", "plain", times("4", 100), ("4",), GROWS),
    Fault("x100 init of the second plain layer", "plain", times("2", 100), ("2",), GROWS, True),
    Fault(
        "x100 init of one convolution",
        "resnet",
        times("layer3.0.conv2", 100),
        ("layer3.0.conv2",),
        GROWS,
        variant="train",
    ),
    Fault(
        "x100 init of a T5 layer",
        "t5",
        times("encoder.block.2.layer.1.DenseReluDense.wi", 100),
        ("encoder.block.2.layer.1.DenseReluDense.wi",),
        GROWS,
        True,
    ),
    Fault(
        "x100 weight of a norm",
        "llama",
        times("model.layers.2.post_attention_layernorm", 100),
        ("model.layers.2.post_attention_layernorm",),
        GROWS,
    ),
    Fault(
        "x0.001 init of one layer",
        "gpt2",
        times("transformer.h.4.attn.c_proj", 1e-3),
        ("transformer.h.4.attn.c_proj",),
        SHRINKS,
    ),
    Fault(
        "small init from block 2 on",
        "gpt2",
        small_from("transformer.h.{}", 2, 6, 0.01),
        ("transformer.h.2.attn.c_attn", "transformer.h.2"),
        SHRINKS,
    ),
    Fault("small init from layer 6 on", "plain", small_from("{}", 6, 16, 0.05), ("6",), SHRINKS),
    Fault(
        "small init from block 4 on",
        "llama",
        small_from("model.layers.{}", 4, 6, 0.01),
        ("model.layers.4.self_attn.q_proj",),
        SHRINKS,
        True,
    ),
    Fault(
        "missing norm in one block",
        "net",
        replaced("blocks.3.norm2", nn.Identity),
        ("blocks.3.norm2",),
        ("no norm",),
        True,
    ),
    Fault(
        "no norms in a residual stack",
        "residual",
        lambda model: None,
        ("0", "1", "0.fc", "1.fc"),
        GROWS,
    ),
    Fault(
        "residual branch lost and shrunk",
        "net",
        broken("blocks.3", "no residual"),
        ("blocks.3",),
        SHRINKS,
    ),
    Fault("dead ReLU by its bias", "plain", bias("6", -1e3), ("7",), ("dead",)),
    Fault(
        "dead ReLU in a CNN", "resnet", bias("layer2.0.bn1", -1e3), ("layer2.0.relu",), ("dead",)
    ),
    Fault(
        "NaN in one weight",
        "gpt2",
        element("transformer.h.1.attn.c_attn", float("nan")),
        ("transformer.h.1.attn.c_attn",),
        ("non-finite",),
    ),
    Fault(
        "NaN in a norm's bias",
        "vit",
        element("vit.layers.2.layernorm_after", float("nan"), "bias"),
        ("vit.layers.2.layernorm_after",),
        ("non-finite",),
        True,
    ),
    Fault(
        "infinity in a weight",
        "llama",
        element("model.layers.2.mlp.gate_proj", float("inf")),
        ("model.layers.2.mlp.gate_proj",),
        ("non-finite",),
    ),
    Fault(
        "overflow in float16",
        "net",
        times("blocks.2.up", 1e5),
        ("blocks.2.up", "blocks.2.act", "blocks.2.down"),
        ("non-finite",),
        dtype=torch.float16,
    ),
    Fault(
        "division of 0 by 0 in the forward",
        "net",
        broken("blocks.4", "log"),
        ("blocks.4.out",),
        ("non-finite",),
        True,
    ),
    Fault("NaN in a second leaf", "pairs", lambda model: None, ("parts.2",), ("non-finite",)),
    Fault(
        "infinite gradient of a square root", "roots", lambda model: None, ("1",), ("non-finite",)
    ),
    Fault(
        "gradient cut by detach", "net", broken("blocks.3", "detach"), ("blocks.3.out",), ("cut",)
    ),
    Fault(
        "gradient of a branch cut by detach",
        "net",
        broken("blocks.2", "detach branch"),
        ("blocks.2.out",),
        ("cut",),
        True,
    ),
    Fault(
        "vanishing gradient through sigmoids",
        "sigmoids",
        lambda model: None,
        ("10", "11", "12", "10.0", "11.0"),
        ("vanishing gradient", "vanishing"),
    ),
    Fault(
        "block tied by mistake",
        "bert",
        tied("bert.encoder.layer", 4, 3),
        ("bert.encoder.layer.3",),
        ("shared",),
    ),
    Fault(
        "saturated softmax by x50 query",
        "net",
        times("blocks.2.query", 50),
        ("blocks.2.query",),
        GROWS,
    ),
    Fault(
        "saturated softmax by its scale",
        "net",
        both(
            *(broken(f"blocks.{k}", "scale") for k in range(6)),
            *(times(f"blocks.{k}.query", 4) for k in range(6)),
        ),
        ("blocks.0.softmax",),
        ("saturated",),
    ),
    Fault(
        "one value head zero",
        "llama",
        rows("model.layers.2.self_attn.v_proj", 16, 32),
        ("model.layers.2.self_attn.v_proj",),
        ("channels",),
    ),
    Fault(
        "one query head zero",
        "bert",
        rows("bert.encoder.layer.1.attention.self.query", 32, 48),
        ("bert.encoder.layer.1.attention.self.query",),
        ("channels",),
        True,
    ),
    Fault(
        "dead channels of a convolution",
        "resnet",
        rows("layer2.0.conv2", 10, 40),
        ("layer2.0.conv2",),
        ("channels",),
    ),
    Fault(
        "an outlier weight",
        "vit",
        element("vit.layers.3.mlp.fc1", 300.0),
        ("vit.layers.3.mlp.fc1",),
        ("outlier", "exploding"),
    ),
    Fault(
        "an outlier weight in a norm",
        "llama",
        element("model.layers.1.input_layernorm", 200.0),
        ("model.layers.1.input_layernorm",),
        ("outlier", "exploding"),
        True,
    ),
    Fault(
        "bfloat16 cast in one block",
        "net",
        broken("blocks.2", "cast"),
        ("blocks.2.act",),
        ("dtype",),
    ),
    Fault(
        "MLP of one block never called",
        "net",
        broken("blocks.4", "skips mlp"),
        ("blocks.4.norm2",),
        ("never called",),
    ),
    Fault(
        "key shares the weights of the query",
        "net",
        same_weights("blocks.1.key", "blocks.1.query"),
        ("blocks.1.query",),
        ("equal",),
        True,
    ),
    Fault(
        "a block frozen by accident",
        "llama",
        frozen("model.layers.2.mlp.down_proj"),
        ("model.layers.2.mlp.down_proj.weight",),
        ("frozen",),
    ),
    Fault(
        "all positions share one vector",
        "bert",
        zero("bert.embeddings.position_embeddings"),
        ("bert.embeddings.position_embeddings",),
        ("dead",),
        True,
    ),
]

# These came last: at their first look, the outlier in a convolution and the head were missed.
FAULTS += [
    Fault(
        "x30 init of one layer",
        "qwen3",
        times("model.layers.3.mlp.gate_proj", 30),
        ("model.layers.3.mlp.gate_proj",),
        GROWS,
        True,
    ),
    Fault(
        "x0.02 init of one layer",
        "llama",
        times("model.layers.3.mlp.down_proj", 0.02),
        ("model.layers.3.mlp.down_proj",),
        SHRINKS,
        True,
    ),
    Fault(
        "decoder layer x100",
        "bart",
        times("model.decoder.layers.2.encoder_attn.v_proj", 100),
        ("model.decoder.layers.2.encoder_attn.v_proj",),
        GROWS,
        True,
    ),
    Fault(
        "NaN in a conv",
        "googlenet",
        element("inception4b.branch2.0.conv", float("nan")),
        ("inception4b.branch2.0.conv",),
        ("non-finite",),
        True,
    ),
    Fault(
        "dead norm channels",
        "googlenet",
        rows("inception3b.branch1.bn", 0, 64),
        ("inception3b.branch1.bn",),
        ("channels",),
        True,
    ),
    Fault(
        "zeroed key",
        "electra",
        zero("electra.encoder.layer.4.attention.self.key"),
        ("electra.encoder.layer.4.attention.self.key",),
        ("dead",),
        True,
    ),
    Fault(
        "NaN in an LSTM",
        "tower",
        element("cells.2", float("nan"), "bias_hh_l0"),
        ("cells.2",),
        ("non-finite",),
        True,
    ),
    Fault(
        "missing norm after a block",
        "gemma3",
        replaced("model.layers.2.post_feedforward_layernorm", nn.Identity),
        ("model.layers.2.post_feedforward_layernorm",),
        ("no norm", "vanishing"),
        True,
    ),
    Fault(
        "small stage",
        "poolformer",
        small_from("stages.2.blocks.{}", 3, 6, 0.01),
        ("stages.2.blocks.3.mlp.fc1", "stages.2.blocks.3"),
        SHRINKS,
        True,
    ),
    Fault(
        "frozen norm",
        "xcit",
        frozen("blocks.5.norm1"),
        ("blocks.5.norm1.weight",),
        ("frozen",),
        True,
    ),
    Fault(
        "outlier in a conv",
        "poolformer",
        element("stages.1.blocks.1.mlp.fc1", 500.0),
        ("stages.1.blocks.1.mlp.fc1",),
        ("outlier", "exploding"),
        True,
    ),
    Fault(
        "fp16 overflow",
        "net",
        times("blocks.4.down", 1e7),
        ("blocks.4.down", "blocks.4.up"),
        ("non-finite",),
        True,
        dtype=torch.float16,
    ),
    Fault(
        "dead ReLU block",
        "squeezenet",
        bias("features.7.squeeze", -1e3),
        ("features.7.squeeze_activation",),
        ("dead",),
        True,
    ),
    Fault(
        "tied conv block",
        "poolformer",
        tied("stages.2.blocks", 2, 1),
        ("stages.2.blocks.1",),
        ("shared",),
        True,
    ),
    Fault(
        "x100 head", "distilbert", times("vocab_transform", 100), ("vocab_transform",), GROWS, True
    ),
]
