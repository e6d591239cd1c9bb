"""Random requests through the real runner and a tiny model, with a drafter that lies and without."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from headrace.compute.grammar.compiler import Compiler
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.weights import dummy_weights
from headrace.compute.runner import LocalRunner
from headrace.core.drafting.forced import ForcedTokenDrafter
from headrace.core.drafting.proposal import Drafter, DraftRow
from headrace.core.engine import Engine
from headrace.core.events import Emitted, Event, Finished, PromptScored
from headrace.core.knobs import Knobs
from headrace.core.plan import TokenLogprob
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.testing.hashing_runner import LyingDrafter
from tests.doubles.engines import plain_engine
from tests.text.vocabularies import byte_level

DEVICE = torch.device("cpu")
BLOCK, MAX_LEN, SEQS = 4, 96, 6
TOKENIZER = byte_level()
(END,) = TOKENIZER.eos_token_ids
VOCAB = TOKENIZER.vocab_size + 5
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
HYBRID = CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "(ab?c|[xyz]{2,5}-)+"},
    {"choice": ["yes, of course", "no", "never"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
]


@functools.cache
def decoder(kernels: str = "torch", sharp: float = 12.0, kind: str = "dense") -> Decoder:
    spec = parse_config({"dense": CONFIG, "experts": EXPERTS, "hybrid": HYBRID}[kind])
    weights = dummy_weights(spec, torch.float32, DEVICE, 4)
    weights.head.mul_(
        sharp
    )  # far from uniform: rounding in a differently shaped batch must not decide a token
    return Decoder(spec, weights, select(kernels, DEVICE), MAX_LEN)


@functools.cache
def compiler() -> Compiler:
    return Compiler(TOKENIZER.backend.to_str, VOCAB, [END])


def random_params(rng: random.Random, vocab_size: int = VOCAB, end: int = END) -> dict[str, Any]:
    """Sampling parameters of a request, any of them with any other; ``end`` is an end-of-sequence token."""

    def some(chance: float, **given: Any) -> dict[str, Any]:
        return given if rng.random() < chance else {}

    few = tuple(rng.randrange(vocab_size) for _ in range(3))
    params = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "max_tokens": rng.choice([1, 2, rng.randint(3, 24), rng.randint(3, 24)]),
        **some(0.2, top_k=rng.randint(1, 40)),
        **some(0.2, top_p=rng.uniform(0.3, 1.0)),
        **some(0.1, min_p=0.03),
        **some(0.2, repetition_penalty=1.3),
        **some(0.2, presence_penalty=0.7),
        **some(0.2, frequency_penalty=0.9),
        **some(0.2, logit_bias=((few[0], 4.0), (end, 3.0))),
        **some(0.2, bad_words=((few[1],), (few[0], few[2]))),
        **some(0.1, stop_token_ids=few),
        **some(0.3, logprobs=rng.randint(0, 3)),
        **some(0.1, prompt_logprobs=rng.randint(0, 2)),
        **some(0.2, structured_outputs=rng.choice(CONSTRAINTS)),
    }
    if "structured_outputs" not in params:
        params |= some(0.2, ignore_eos=True) | some(0.1, allowed_token_ids=(*range(0, vocab_size, 2), end))
    return params | some(0.2, min_tokens=rng.randint(0, params["max_tokens"]))


def random_requests(seed: int, count: int) -> list[Request]:
    """Requests with common beginnings of prompts."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(VOCAB) for _ in range(30)) for _ in range(4)]
    made = []
    for number in range(count):
        tokens = rng.choice(prefixes)[: rng.randint(1, 30)] + tuple(
            rng.randrange(VOCAB) for _ in range(rng.randint(0, 12))
        )
        params = SamplingParams(**random_params(rng))
        ends = frozenset({END})
        made.append(Request(f"r{number}", tokens, params, seed=rng.randrange(1 << 40), eos_token_ids=ends))
    return made


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt: tuple[TokenLogprob, ...]
    end: Finished


class Run(NamedTuple):
    answers: dict[str, Answer]
    events: list[Event]


def serve(
    todo: Sequence[Request],
    drafter: Drafter | None = None,
    *,
    blocks: int = 200,
    batched_tokens: int = 512,
    overlap: int = 0,
    prefix_caching: bool = True,
    kernels: str = "torch",
    sharp: float = 12.0,
    kv_dtype: torch.dtype = torch.float32,
    forced: bool = False,
    between: Callable[[Engine, float], None] = lambda engine, now: None,
) -> Run:
    """Serve the requests to their ends, a few of them arriving at each step; ``between`` is called after each.

    ``forced``: what grammars force is drafted, before what ``drafter`` says.
    """
    matchers = Matchers(compiler(), SEQS)
    runner = LocalRunner(
        decoder(kernels, sharp),
        PagedKV(decoder(kernels, sharp).spec.shape, blocks, BLOCK, kv_dtype, DEVICE),
        vocab_size=VOCAB,
        max_num_seqs=SEQS,
        max_model_len=MAX_LEN,
        device=DEVICE,
        background=overlap > 0,
        matchers=matchers,
    )
    engine = plain_engine(
        runner,
        blocks,
        BLOCK,
        knobs=Knobs(batched_tokens=batched_tokens),
        overlap=overlap,
        max_num_seqs=SEQS,
        max_model_len=MAX_LEN,
        prefix_caching=prefix_caching,
        drafter=ForcedTokenDrafter(matchers.forced, drafter) if forced else drafter,
    )
    run = drive(engine, todo, between=between)
    runner.close()
    return run


def drive(
    engine: Engine,
    todo: Sequence[Request],
    now: float = 0.0,
    between: Callable[[Engine, float], None] = lambda engine, now: None,
) -> Run:
    """Serve the requests to their ends from ``now`` on, a few of them arriving at each step of a second."""
    seen: list[Event] = []
    waiting = list(reversed(todo))
    while waiting or engine.wake_at(now) is not None:
        for _ in range(min(len(waiting), 3)):
            engine.submit(waiting.pop(), now)
        now += 1.0
        seen += engine.step(now)
        between(engine, now)
    engine.check_consistency()
    return Run(_answers(seen), seen)


def _answers(events: list[Event]) -> dict[str, Answer]:
    tokens: dict[str, tuple[int, ...]] = {}
    logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
    prompts: dict[str, tuple[TokenLogprob, ...]] = {}
    ends: dict[str, Finished] = {}
    for event in events:
        match event:
            case Emitted(name, drawn, scored):
                assert name not in ends, "tokens after the end"
                assert len(scored) in (0, len(drawn))
                tokens[name] = tokens.get(name, ()) + drawn
                logprobs[name] = logprobs.get(name, ()) + scored
            case PromptScored(name, _, scored):
                prompts[name] = prompts.get(name, ()) + scored
            case Finished(name):
                assert name not in ends, "two ends"
                ends[name] = event
    return {
        name: Answer(tokens.get(name, ()), logprobs.get(name, ()), prompts.get(name, ()), end)
        for name, end in ends.items()
    }


def without(run: Run, names: set[str]) -> Run:
    """A run without some of its answers."""
    return run._replace(answers={name: each for name, each in run.answers.items() if name not in names})


def liar(known: Run, seed: int, vocab_size: int = VOCAB) -> LyingDrafter:
    """A drafter that knows what is said without it, and behind the end of an answer says something."""

    def truth(draft_row: DraftRow, count: int) -> Sequence[int]:
        said = len(draft_row.tokens) - len(draft_row.request.tokens)
        return (*known.answers[draft_row.request.id].tokens, *range(count))[said : said + count]

    return LyingDrafter(truth, seed, vocab_size)


def check_same(plain: Run, drafted: Run) -> None:
    """Tokens, ends and usage are equal, log-probabilities as equal as a differently shaped batch leaves them."""
    assert drafted.answers.keys() == plain.answers.keys()
    for name, answer in plain.answers.items():
        other = drafted.answers[name]
        assert other.tokens == answer.tokens, name
        assert other.end._replace(cached_tokens=0) == answer.end._replace(cached_tokens=0), name
        assert answer.end.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.FAILED)
        for mine, yours in ((answer.logprobs, other.logprobs), (answer.prompt, other.prompt)):
            assert [(s.token, s.rank) for s in mine] == [(s.token, s.rank) for s in yours], name
            for one, two in zip(mine, yours, strict=True):
                assert abs(one.logprob - two.logprob) < 1e-3
                assert all(abs(x - y) < 1e-3 for (_, x), (_, y) in zip(one.top, two.top, strict=True)), name
