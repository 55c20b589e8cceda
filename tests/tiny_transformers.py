"""Random transformers of two layers and width 32."""

from __future__ import annotations

import torch
from torch import nn

from hookline.models.torchvision_import import import_torchvision

import_torchvision()  # transformers imports it, and cannot where its operators are missing

_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def tiny(name: str) -> nn.Module:
    """Build a causal model whose numbers are not those of a fresh one."""
    import transformers as tf

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_positions": 64}
        config = tf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
        model = tf.GPT2LMHeadModel(config)
    elif name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZES))
    elif name == "mixtral":
        config = tf.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
        model = tf.MixtralForCausalLM(config)
    elif name == "qwen2moe":
        widths = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        config = tf.Qwen2MoeConfig(**_SIZES, **_EXPERTS, **widths, decoder_sparse_step=1)
        model = tf.Qwen2MoeForCausalLM(config)
    elif name == "olmoe":
        model = tf.OlmoeForCausalLM(tf.OlmoeConfig(**_SIZES, **_EXPERTS))
    else:
        kinds = ["sliding_attention", "full_attention"]
        config = tf.GptOssConfig(
            **_SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=kinds,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        model = tf.GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None  # no row ends early
    return model.eval()
