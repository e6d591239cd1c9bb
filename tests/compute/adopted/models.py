"""Tiny models of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model of a type; norms and biases are random too, so that none of them is neutral."""
    config = AutoConfig.for_model(kind)
    given = {**SIZES, **EXPERTS, **fields}
    known = {name: value for name, value in given.items() if name in fields or hasattr(config, name)}
    config = AutoConfig.for_model(kind, **known)
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model.to(dtype)


@torch.inference_mode()
def logits(model: Any, length: int = 20) -> torch.Tensor:
    """Of a row of tokens, by the model itself."""
    tokens = torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(1))
    found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()
    return found
