"""An EAGLE-3 head beside the built-in model: what it drafts, its memory, and the same text with and without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Taps
from headrace.compute.drafting.head import HeadDrafts
from headrace.compute.model.kv import PagedKV
from headrace.config import ConfigError, options
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.events import Event, Preempted
from headrace.wiring import model
from tests.compute.drafting.heads import ATTENTION, MLP, tensors, write_head
from tests.oracle.harness import pack
from tests.wiring.test_draft_model import answers

TOKENS = 4
SCARCE = {"kv_cache_memory_bytes": 600 << 10, "max_model_len": 96, "scheduling_policy": "fcfs"}
"""A pool in which requests are preempted."""


@pytest.fixture(autouse=True)
def every_guess_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are hardly ever confident."""
    monkeypatch.setattr("headrace.compute.drafting.head.LEAST_CONFIDENCE", 0.0)


def load(folder: Path | None, **more: Any) -> model.Loaded:
    drafts = {"method": "eagle3", "model": str(folder), "adaptive": False, "num_speculative_tokens": TOKENS}
    given = {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 24 << 20,
        "max_num_seqs": 6,
        "dtype": "float32",
        "speculative_config": folder and json.dumps(drafts),
    }
    return model.load(options(given | more))


def head_of(loaded: model.Loaded) -> HeadDrafts:
    found = loaded.runner._head
    assert found is not None
    return found


def proposals_of(head: HeadDrafts) -> list[tuple[list[int], Proposal]]:
    """Fills with the known tokens of each ask and what is proposed."""
    found, propose = list[tuple[list[int], Proposal]](), head._propose

    def noted(draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        proposals = propose(draft_rows)
        found.extend(
            (list(draft_row.tokens), each)
            for draft_row, each in zip(draft_rows, proposals, strict=True)
            if each
        )
        return proposals

    head._propose = noted  # type: ignore[method-assign]
    return found


class Naive:
    """The head by plain operations on a whole sequence."""

    def __init__(self, loaded: model.Loaded, **fields: Any) -> None:
        self.loaded, self.weights = loaded, tensors(**fields)
        self.normed = bool(fields.get("norm_before_residual"))
        target = head_of(loaded)._head._weights
        self.embedding = self.weights.get("embed_tokens.weight", target.embedding).float()
        self.head = self.weights.get("lm_head.weight", target.embedding).float()

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The target's states, by a pass of its own."""
        shape, count = self.loaded.shape, len(tokens)
        blocks = -(-count // 16)
        kv = PagedKV(shape, blocks, 16, torch.float32)
        taps = Taps(torch.empty(count, 3 * shape.hidden_size), np.array([1, 2, 3]))
        batch = pack(
            list(tokens), [0], [count], [list(range(blocks))], list(range(count)), 16, torch.device("cpu")
        )
        object.__setattr__(batch, "taps", taps)
        self.loaded.decoder.hidden(batch, kv)
        return taps.states

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        w, known = self.weights, list(tokens)
        states = self.states(known[:-1]) @ w["fc.weight"].T
        for _ in range(count):
            after = torch.tensor(known[1:])
            own = self.layer(self.embedding[after], states)
            logits = F.rms_norm(own[-1], own.shape[-1:], w["norm.weight"], 1e-5) @ self.head.T
            guess = int(logits.argmax())
            known.append(guess + int(w["d2t"][guess]) if "d2t" in w else guess)
            states = torch.cat([states, own[-1:]])
        return known[len(tokens) :]

    def layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        w, count = self.weights, len(states)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], w[f"midlayer.{name}.weight"], 1e-5)

        residual = norm(states, "hidden_norm") if self.normed else states
        x = torch.cat((norm(embedded, "input_layernorm"), norm(states, "hidden_norm")), -1)
        q, k, v = (
            (x @ w[f"{ATTENTION}{name}_proj.weight"].T).view(count, -1, 32).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, 32, 2) / 32)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turn(x: Tensor) -> Tensor:
            return x * cos + torch.cat((-x[..., 16:], x[..., :16]), -1) * sin

        q, k, v = turn(q), turn(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = residual + seen.transpose(0, 1).flatten(1) @ w[f"{ATTENTION}o_proj.weight"].T
        y = norm(x, "post_attention_layernorm")
        gated = F.silu(y @ w[f"{MLP}gate_proj.weight"].T) * (y @ w[f"{MLP}up_proj.weight"].T)
        return x + gated @ w[f"{MLP}down_proj.weight"].T


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, {}),
        ({"norm_before_residual": True}, {"max_num_batched_tokens": 8}),
        ({"draft_vocab_size": 500}, SCARCE | {"max_num_batched_tokens": 9}),
        ({"hidden_size": 64, "target_hidden_size": 256}, {"kernels": "torch"}),
    ],
    ids=["whole", "in chunks", "preempted, few tokens", "narrow, torch"],
)
def test_drafts_are_what_the_head_says_on_the_whole_sequence(
    tmp_path: Path, fields: dict[str, Any], more: dict[str, Any]
) -> None:
    loaded = load(write_head(tmp_path, **fields), enable_prefix_caching=False, **more)
    noted = proposals_of(head_of(loaded))
    _, verified = answers(loaded, 1.0)
    assert {event.source for event in verified} == {"eagle3"}
    naive = Naive(loaded, **fields)
    assert len(noted) > 100
    with torch.inference_mode():
        for tokens, proposal in noted[:: len(noted) // 25]:
            assert list(proposal.tokens) == naive.drafts(tokens, len(proposal.tokens))
    model.close(loaded)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, SCARCE], ids=["ample", "preempted"])
def test_the_text_is_the_same_with_and_without_a_head(
    tmp_path: Path, temperature: float, more: dict[str, Any]
) -> None:
    plain, drafted = load(None), load(write_head(tmp_path), **more)
    expected, _ = answers(plain, temperature)
    found, verified = answers(drafted, temperature)
    assert found == expected
    assert sum(event.drafted for event in verified) > 500
    assert not head_of(drafted)._slot_of, "requests that have ended"
    model.close(plain)
    model.close(drafted)


def test_right_drafts_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target's own choices in place of the head's, states of several accepted tokens are read at once."""
    plain, drafted = load(None), load(write_head(tmp_path), enable_prefix_caching=False)
    expected, _ = answers(plain, 0.0)
    head = head_of(drafted)
    noted, propose = proposals_of(head), head._propose

    def right(draft_rows: Sequence[DraftRow]) -> list[Proposal | None]:
        propose(draft_rows)
        said = [len(draft_row.tokens) - len(draft_row.request.tokens) for draft_row in draft_rows]
        true = [
            tuple(expected[draft_row.request.id][begin : begin + 3])
            for draft_row, begin in zip(draft_rows, said, strict=True)
        ]
        return [Proposal(each, (1.0,) * len(each), "eagle3") if each else None for each in true]

    monkeypatch.setattr(head, "_propose", right)
    found, verified = answers(drafted, 0.0)
    assert found == expected
    assert sum(event.accepted for event in verified) == sum(event.drafted for event in verified) > 100
    naive = Naive(drafted)
    with torch.inference_mode():
        for tokens, proposal in noted[:: len(noted) // 15]:
            assert list(proposal.tokens) == naive.drafts(tokens, len(proposal.tokens))
    model.close(plain)
    model.close(drafted)


def test_a_head_that_fails_costs_its_drafts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(None)
    expected, _ = answers(plain, 0.0)
    for method in ("_observe", "_propose"):
        drafted = load(write_head(tmp_path))

        def fail(*call: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(head_of(drafted), method, fail)
        found, verified = answers(drafted, 0.0)
        assert found == expected
        assert not verified
        model.close(drafted)
    warned = [record.getMessage() for record in caplog.records if "draft head" in record.getMessage()]
    assert warned == ["the draft head failed (out of memory); requests continue without its drafts"] * 2
    model.close(plain)


def test_the_memory_plan_has_the_head_within_the_bytes_of_the_options(tmp_path: Path) -> None:
    plain, loaded = load(None), load(write_head(tmp_path))
    ledger, head = loaded.ledger, head_of(loaded)
    assert ledger.draft_blocks == ledger.num_blocks
    assert 0.95 * (24 << 20) < ledger.kv_bytes + ledger.draft_kv_bytes <= 24 << 20
    assert ledger.draft_weight_bytes == sum(each.nbytes for each in tensors().values())
    beyond = head._kv.nbytes - ledger.draft_kv_bytes + head._pending.nbytes
    assert 0 < beyond < ledger.activation_bytes - plain.ledger.activation_bytes
    model.close(plain)
    model.close(loaded)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_offload_bytes": 1 << 24}, "eagle3 keeps keys and values in the blocks of the device"),
        ({"overlap": 1}, "--overlap 1: method eagle3 needs the output of a step first; use 0"),
    ],
)
def test_options_that_exclude_a_head_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_head(tmp_path), **more)


def test_a_random_head_of_the_config_s_shape_is_enough_for_benchmarks(tmp_path: Path) -> None:
    folder = write_head(tmp_path, draft_vocab_size=300)
    (folder / "model.safetensors").unlink()
    loaded = load(folder, load_format="dummy")
    _, verified = answers(loaded, 0.0)
    assert sum(event.drafted for event in verified) > 500
    model.close(loaded)


def test_requests_are_preempted_in_these_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(write_head(tmp_path), enable_prefix_caching=False, **SCARCE)
    step, preempted = loaded.engine.step, list[Preempted]()

    def noted(now: float) -> list[Event]:
        events = list(step(now))
        preempted.extend(event for event in events if isinstance(event, Preempted))
        return events

    monkeypatch.setattr(loaded.engine, "step", noted)
    answers(loaded, 0.0)
    assert preempted
    model.close(loaded)
