"""A small Llama decoder for training; its parameter names are those of the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from training.tokenizer import MAX_LENGTH, SPECIALS, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int = VOCAB_SIZE
    rope_theta: float = 10_000.0
    max_length: int = MAX_LENGTH
    eps: float = 1e-5


TARGET = Shape(hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, ffn=768)
DRAFT = Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=384)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


DENSE = 320  # positions; up to here one dense product is faster on a CPU than the blocks of flash attention


def _dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [n, groups, t, d] on k, v [n, t, d], with all scores at once."""
    n, groups, t, d = q.shape
    scores = torch.bmm(q.reshape(n, groups * t, d) * d**-0.5, k.transpose(1, 2)).view(n, groups, t, t)
    later = torch.ones(t, t, dtype=torch.bool).triu(1)
    shares = scores.float().masked_fill(later, float("-inf")).softmax(-1).to(v.dtype)
    return torch.bmm(shares.view(n, groups * t, t), v)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention's output for all positions of the batch."""
        s = self.shape
        b, t, _ = x.shape
        q = _rotate(self.q_proj(x).view(b, t, s.heads, s.head_dim).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        groups = s.heads // s.kv_heads
        if t <= DENSE:
            out = _dense_attention(
                q.reshape(b * s.kv_heads, groups, t, s.head_dim), k.flatten(0, 1), v.flatten(0, 1)
            )
            out = out.view(b, s.heads, t, s.head_dim)
        else:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
        return result


class FeedForward(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer's feed-forward part."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


EMBEDDING_SCALE = 0.2  # large beside what the layers add at first, so that a token can be told in every layer
FINAL_SCALE = 0.3  # so that the tied head is not too sure of itself


class Decoder(nn.Module):
    """A Llama decoder with tied embeddings; its layers add nothing before they learn."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = EMBEDDING_SCALE if "embed" in name else p.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale = 0.0
                nn.init.normal_(p, std=scale)
        nn.init.constant_(self.model.norm.weight, FINAL_SCALE)
        steps = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_length), shape.rope_theta**-steps)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Return the last hidden states at the flat positions ``rows`` of the batch."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # type: ignore[index]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.model.norm(x).flatten(0, 1)[rows]
        return normed

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Return the logits at the flat positions ``rows`` of the batch."""
        return F.linear(self.hidden(ids, positions, rows), self.model.embed_tokens.weight)


def parameter_count(model: nn.Module) -> int:
    """Return how many parameters the model has; tied ones count once."""
    return sum(p.numel() for p in model.parameters())


def save_model(model: Decoder, folder: Path) -> None:
    """Write bf16 weights, ``config.json`` and ``generation_config.json`` in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = model.shape
    token = {name: i for i, name in enumerate(SPECIALS)}
    eos = [token["<|end|>"], token["<|endoftext|>"]]
    ids = {"bos_token_id": token["<|bos|>"], "eos_token_id": eos, "pad_token_id": token["<|pad|>"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {**ids, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
