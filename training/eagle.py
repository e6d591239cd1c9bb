"""Train an EAGLE-3 head for the built-in model: ``python -m training.eagle --out FOLDER``.

```
 depth 1   state of the target at p, token p + 1   ─► the target's distribution at p + 1
 depth 2   own state of depth 1,     token p + 2   ─► the target's distribution at p + 2   and so on
```
At each depth the head reads its own states, as it does when it drafts. Keys of depth 1 are those of all positions up to
``p``; of later depths each position sees its own. The head shares embedding and output head of the target.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.build import BUILTIN
from training.model import TARGET, Decoder, FeedForward, Shape, _rotate
from training.train import Batch, Muon, batches

DEPTH = 3
STEPS = 320
MICRO_BATCHES = 4
SHAPE = Shape(hidden=256, layers=1, heads=4, kv_heads=2, head_dim=64, ffn=384)
LAYERS = (1, 2, 3)
"""States before these layers of the target are read; the last is the state after all layers."""

Keys = tuple[Tensor, Tensor]


class HeadAttention(nn.Module):
    """Attention over the keys of the first depth, and over its own keys at later depths."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, earlier: list[Keys]) -> Tensor:
        """The attention's output [n, t, hidden]; the keys and values are appended to ``earlier``."""
        s = self.shape
        n, t, _ = x.shape

        def heads(linear: nn.Linear) -> Tensor:
            return linear(x).view(n, t, -1, s.head_dim).transpose(1, 2)

        groups = s.heads // s.kv_heads
        q = _rotate(heads(self.q_proj), cos, sin) * s.head_dim**-0.5
        k = _rotate(heads(self.k_proj), cos, sin).repeat_interleave(groups, 1)
        v = heads(self.v_proj).repeat_interleave(groups, 1)
        earlier.append((k, v))
        (first_k, first_v), *own = earlier
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(later, float("-inf"))]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]
        shares = torch.cat(scores, -1).float().softmax(-1).to(v.dtype)
        out = shares[..., :t] @ first_v
        for place, (_, value) in enumerate(own):
            out = out + shares[..., t + place, None] * value
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(n, t, -1))
        return result


class Midlayer(nn.Module):
    """The head's only layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, token: Tensor, state: Tensor, cos: Tensor, sin: Tensor, earlier: list[Keys]) -> Tensor:
        """The head's own state after ``state`` and ``token``."""
        x = torch.cat((self.input_layernorm(token), self.hidden_norm(state)), -1)
        x = state + self.self_attn(x, cos, sin, earlier)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle(nn.Module):
    """The head; parameter names are those of published EAGLE-3 checkpoints."""

    def __init__(self, shape: Shape, target: Decoder) -> None:
        super().__init__()
        hidden = shape.hidden
        self.fc = nn.Linear(len(LAYERS) * target.shape.hidden, hidden, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(hidden, shape.eps)
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)
            self.midlayer.mlp.down_proj.weight.zero_()
            self._lay_copying()

    def _lay_copying(self) -> None:
        """Attend to where the present token stood before, and repeat the one after it: see `induction`.

        The target's first state is little more than its token, so a query from the token matches a key from the state.
        Only slowly rotating features are used. The state is turned so that it promises no token itself.
        """
        s, attention = SHAPE, self.midlayer.self_attn
        size, half = s.hidden, s.head_dim // 2
        turned, other = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2))
        self.fc.weight.zero_()
        self.fc.weight[:, :size], self.fc.weight[:, -size:] = turned, 0.5 * other
        slow = [i for i in range(s.head_dim) if i % half >= half // 2]
        match = torch.zeros(s.kv_heads, s.head_dim, size)
        match[:, slow] = 2 * torch.linalg.qr(torch.randn(s.kv_heads, size, len(slow)))[0].transpose(1, 2)
        repeat = torch.linalg.qr(torch.randn(size, s.kv_heads * s.head_dim))[0].T
        groups = s.heads // s.kv_heads
        attention.q_proj.weight.mul_(0.1)[:, :size] += match.repeat_interleave(groups, 0).flatten(0, 1)
        attention.k_proj.weight.mul_(0.1)[:, size:] += match.flatten(0, 1) @ turned.T
        attention.v_proj.weight.mul_(0.1)[:, :size] += repeat
        back = repeat.view(s.kv_heads, s.head_dim, size).repeat_interleave(groups, 0).flatten(0, 1).T
        attention.o_proj.weight.copy_(back / groups)


def states_of(target: Decoder, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The target's states that the head reads [n, t, 3 * hidden], and its last normed ones [n, t, hidden]."""
    cos, sin = target.cos[positions].unsqueeze(1), target.sin[positions].unsqueeze(1)  # type: ignore[index]
    x, found = target.model.embed_tokens(ids), []
    for number, layer in enumerate(target.model.layers, 1):
        x = layer(x, cos, sin)
        if number in LAYERS:
            found.append(x)
    return torch.cat(found, -1), target.model.norm(x)


def loss_of(head: Eagle, target: Decoder, batch: Batch) -> tuple[Tensor, list[float]]:
    """The weighted cross-entropy over all depths, and the share of the likeliest tokens that agree, by depth."""
    embedding = target.model.embed_tokens.weight
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        states, last = states_of(target, batch.ids, batch.positions)
    n, t = batch.ids.shape
    weights = torch.zeros(n * t)
    weights[batch.rows] = batch.weights
    weights = weights.view(n, t)
    earlier: list[Keys] = []
    total, agreed = torch.zeros(()), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = head.fc(states)
        for depth in range(1, DEPTH + 1):
            ahead = torch.roll(batch.ids, -depth, 1)
            places = torch.roll(batch.positions, -(depth - 1), 1)
            cos, sin = target.cos[places].unsqueeze(1), target.sin[places].unsqueeze(1)  # type: ignore[index]
            state = head.midlayer(F.embedding(ahead, embedding), state, cos, sin, earlier)
            weight = torch.roll(weights, -depth, 1)
            weight[:, t - depth :] = 0
            rows = weight.flatten().nonzero().squeeze(1)
            logits = F.linear(head.norm(state).flatten(0, 1)[rows], embedding).float()
            with torch.no_grad():
                truth = F.linear(torch.roll(last, -depth, 1).flatten(0, 1)[rows], embedding).float()
                agreed.append(float((truth.argmax(-1) == logits.argmax(-1)).float().mean()))
            each = -(truth.softmax(-1) * logits.log_softmax(-1)).sum(-1)
            part = weight.flatten()[rows]
            total = total + (each * part).sum() / part.sum().clamp(min=1e-6) * 0.8 ** (depth - 1)
    return total, agreed


def save_head(head: Eagle, folder: Path) -> None:
    """Write bfloat16 weights and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: each.detach().to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.ffn,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "vocab_size": SHAPE.vocab,
        "max_position_embeddings": SHAPE.max_length,
        "rope_theta": SHAPE.rope_theta,
        "rms_norm_eps": SHAPE.eps,
        "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]},
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(out: Path, steps: int, seed: int, seconds: float, target_folder: Path = BUILTIN / "target") -> bool:
    """Train ``steps`` steps and write the head to ``out``; whether all are done after ``seconds``.

    Another call goes on from what is written.
    """
    torch.manual_seed(seed)
    target = Decoder(TARGET)
    weights = load_file(target_folder / "model.safetensors")
    target.load_state_dict({name: each.float() for name, each in weights.items()}, strict=False)
    target.requires_grad_(False)
    head = Eagle(SHAPE, target)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    norms = [p for p in head.parameters() if p.ndim == 1]
    muon, adam = Muon(matrices), torch.optim.AdamW(norms, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    file, first = out.with_suffix(".state.pt"), 0
    if file.exists():
        state = torch.load(file)
        head.load_state_dict(state["head"])
        adam.load_state_dict(state["adam"])
        muon.buffers = dict(zip(matrices, state["muon"], strict=True))
        first = state["step"]
    feed = batches(Tokenizer.from_file(str(target_folder / "tokenizer.json")), seed + 77, 1024, shard=512)
    for _ in range(first * MICRO_BATCHES):
        next(feed)
    began = time.time()
    for step in range(first, steps):
        rate = min(1.0, (step + 1) / 20, (steps - step) / (0.6 * steps))
        agreed = []
        for batch in islice(feed, MICRO_BATCHES):
            loss, shares = loss_of(head, target, batch)
            (loss / MICRO_BATCHES).backward()
            agreed.append(shares)
        for p in matrices:
            assert p.grad is not None
            muon.step(p, p.grad, 0.02 * rate)
        adam.param_groups[0]["lr"] = 4e-3 * rate
        adam.step()
        head.zero_grad()
        if step % 10 == 9:
            shown = ", ".join(f"{sum(each) / MICRO_BATCHES:.3f}" for each in zip(*agreed, strict=True))
            print(
                f"step {step + 1} loss {loss.item():.3f} agreement {shown} {time.time() - began:.0f} s",
                flush=True,
            )
        if time.time() - began > seconds or step + 1 == steps:
            save_head(head, out)
            parts = {
                "head": head.state_dict(),
                "adam": adam.state_dict(),
                "muon": list(muon.buffers.values()),
            }
            torch.save({**parts, "step": step + 1}, file)
            if step + 1 < steps:
                return False
    file.unlink(missing_ok=True)
    return True


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop then; the next call goes on"
    )
    args = parser.parse_args()
    train(args.out, args.steps, args.seed, args.seconds)


if __name__ == "__main__":
    main()
