"""Every causal type of transformers from a shrunk config: width 32, and every kind of layer.

Default configs hide faults: multipliers are 1, no cap is reached, heads divide the width. So the
multipliers here are not 1, caps are low, windows are shorter than the texts, there are fewer key
and value heads than heads, heads are wider than width / heads, and all weights are perturbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hookline.models.torchvision_import import import_torchvision

import_torchvision()  # transformers imports it, and cannot where its operators are missing

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, VOCABULARY, TOKENS = 32, 4, 2, 16, 100, 9

# What the numbers of a config become, by name.
_SIZES: dict[str, Any] = {
    name: value
    for names, value in {
        "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim"
        " input_embedding_size backbone_hidden_size attention_hidden_size lru_width": WIDTH,
        "intermediate_size n_inner d_inner ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff"
        " ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size"
        " ffn_size": 48,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"
        " expert_ffn_hidden_size moe_shared_expert_intermediate_size"
        " output_embedding_size vocab_size_per_layer_input": 24,
        "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input": VOCABULARY,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"
        " num_decoder_layers num_encoder_layers num_blocks": 3,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads"
        " encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"
        " swa_num_attention_heads index_n_heads linear_num_value_heads linear_num_heads"
        " indexer_n_heads": HEADS,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"
        " num_query_groups indexer_kv_heads": KV_HEADS,
        "head_dim d_head kv_channels attention_head_size swa_head_dim index_head_dim d_kv"
        " attention_head_dim linear_head_dim linear_key_head_dim global_head_dim"
        " indexer_head_dim": HEAD_WIDTH,
        "linear_value_head_dim v_head_dim": 12,
        "q_lora_rank kv_lora_rank o_lora_rank": 16,
        "qk_rope_head_dim qk_nope_head_dim rotary_dim": 8,
        "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num": 4,
        "num_experts_per_tok num_experts_per_token moe_topk top_k_experts moe_k": 2,
        "n_shared_experts num_shared_experts moe_num_shared_experts topk_group n_group"
        " num_expert_group decoder_sparse_step interleave_moe_layer_step expert_layer_period"
        " first_k_dense_replace num_dense_layers": 1,
        "sliding_window window_size attention_window_size sliding_window_size local_attention"
        " attention_chunk_size mamba_d_conv conv_kernel mem_len sliding_window_pattern"
        " _sliding_window_pattern": 4,
        "max_position_embeddings n_positions max_seq_len model_max_length context_length"
        " max_target_positions": 64,
        "mamba_d_state state_size ssm_state_size": 8,
        "mamba_n_heads mamba_num_heads": 8,
        "mamba_d_head mamba_head_dim mamba_headdim": 8,
        "mamba_chunk_size chunk_size": 4,
        "index_topk index_topk_blocks": 4,
        "n_groups mamba_n_groups mamba_ngroups": 2,
        "time_step_rank mamba_dt_rank hc_lowrank": 4,
        "embedding_multiplier scale_emb embedding_scale": 2.0,
        "residual_multiplier": 0.3,
        "attention_multiplier key_multiplier attention_out_multiplier ssm_in_multiplier"
        " attention_in_multiplier ssm_out_multiplier lm_head_multiplier attn_scale": 0.7,
        "logits_scaling logit_scale": 1.7,
        "routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor": 1.5,
        "final_logit_softcapping logits_soft_cap output_logit_soft_cap": 2.0,
        "attn_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 10,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "is_decoder attention_bias mlp_bias add_bias_linear": True,
    }.items()
    for name in names.split()
}  # fmt: skip


# The types that are not built, or do not run, and why.
CANNOT = {
    "blt": "its patches need a second model",
    "cohere_compass_text": "it wants the rotary numbers of each kind of layer",
    "dbrx": "its nested configs have names of their own",
    "dots3_note": "its number of heads differs by layer, outside of the config",
    "dots3_note_text": "as dots3_note: 38 million parameters",
    "gemma3n": "its picture encoder is of timm, with 294 million parameters; see gemma3n_text",
    "gemma4_assistant": "it is a draft model, and reads the cache of another",
    "gemma4_unified_assistant": "it is a draft model, and reads the cache of another",
    "musicgen": "its tokens are of several codebooks",
    "musicgen_melody": "its tokens are of several codebooks",
    "qwen4_exp": "its default config has no sizes for its indexer",
    "qwen4_exp_text": "its default config has no sizes for its indexer",
    "zamba": "its shared blocks want other sizes",
}

# What a type needs besides, or otherwise; None leaves the number as the type has it.
_AS_IT_IS = "as it is"
_OWN: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    },
    "dots1": {
        "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 24, "head_dim": 16,
        "per_layer_config": _AS_IT_IS, "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
        "global_head_dim": 24, "head_dim": 16, "per_layer_config": _AS_IT_IS,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "helium": {"head_dim": 8},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_hidden_layers": 4, "use_mamba_kernels": False,
    },
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4, "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2,
        "attention_hidden_size": 64, "kv_channels": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def _small(config: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that make a config small: numbers by name, one layer of each kind."""
    values: dict[str, Any] = {}
    fields = config.to_dict()
    depths = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
    depth = next((fields[name] for name in depths if isinstance(fields.get(name), int)), 0)
    by_layer = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and depth and len(value) == depth
    }
    kept = _kinds(by_layer, depth)
    for name, value in fields.items():
        part = getattr(config, name, None) if isinstance(value, dict) else None
        if name in own:
            values[name] = own[name]
        elif name in by_layer:
            values[name] = [value[k] for k in kept]
        elif hasattr(part, "to_dict"):
            values[name] = type(part)(**_small(part, _OWN.get(part.model_type, {})))
        elif name in depths and by_layer:
            values[name] = len(kept)
        elif name in _SIZES and _is_number(name, value):
            values[name] = _SIZES[name]
    values = {name: value for name, value in values.items() if value != _AS_IT_IS}
    if fields.get("kv_lora_rank"):  # latent attention: no grouped heads, and a derived width
        values["num_key_value_heads"] = HEADS
        values.pop("head_dim", None)
    values.update({name: value for name, value in own.items() if value != _AS_IT_IS})
    return values


def _is_number(name: str, value: Any) -> bool:
    return not isinstance(value, list | dict) and (value is not None or name == "head_dim")


def _kinds(by_layer: Mapping[str, list[Any]], depth: int) -> list[int]:
    """Return the first layer of each kind, at most four, and at least two layers."""
    rows = [str([value[k] for value in by_layer.values()]) for k in range(depth)]
    strings = [
        str([value[k] for value in by_layer.values() if isinstance(value[k], str)])
        for k in range(depth)
    ]
    first: dict[str, int] = {}
    for k, row in enumerate(strings if len(set(rows)) > 4 else rows):
        first.setdefault(row, k)
    kept = list(first.values())[:4]
    return kept if len(kept) > 1 else [*kept, *range(1, 3)]


def names() -> list[str]:
    """Return the causal types of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str, attention: str | None = None) -> nn.Module:
    """Build the model of a type, of perturbed weights, in eval mode."""
    import transformers as tf
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.manual_seed(0)
    own = _OWN.get(name, {})
    kind = getattr(tf, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    config = kind.config_class(**_small(kind.config_class(), own))
    if attention is not None:
        config._attn_implementation = attention
    model = kind(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def texts(seed: int = 0, rows: int = 2, tokens: int = TOKENS) -> dict[str, Any]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    return {"input_ids": ids, "use_cache": False}
