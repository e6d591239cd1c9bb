"""The sampler against a plain one that reads like the definitions, row by row, in double precision.

What asks for tokens only is asked of every backend's choosing; distributions are looked at in torch's, to which
`tests/compute/kernels` holds the others.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.compute.kernels import Kernels, KernelsUnavailable, select
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.sampling import choice as filters
from headrace.compute.sampling import penalties
from headrace.compute.sampling.choice import NOT_FINITE, NOTHING_ALLOWED
from headrace.compute.sampling.sampler import Sampler, uniforms
from headrace.core.plan import Entry
from headrace.core.request import SamplingParams

VOCAB = 300  # not a multiple of the pieces of a draw
WIDTH = 64


def naive_logits(raw: list[float], tokens: list[int], entry: Entry) -> list[float]:
    """Constraints and penalties as their definitions say."""
    params, logits = entry.params, list(raw)
    for token, bias in params.logit_bias:
        logits[token] += bias
    if params.allowed_token_ids is not None:
        logits = [x if t in params.allowed_token_ids else -math.inf for t, x in enumerate(logits)]
    for word in params.bad_words:
        if len(word) == 1 or tuple(tokens[-(len(word) - 1) :]) == word[:-1]:
            logits[word[-1]] = -math.inf
    output = tokens[entry.prompt_tokens :]
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            logits[token] = -math.inf
        if not params.ignore_eos:
            for token in entry.eos_token_ids & set(range(len(logits))):
                logits[token] = -math.inf
    for token in set(tokens):
        r = params.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def softmax(logits: list[float]) -> list[float]:
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def naive_probabilities(raw: list[float], tokens: list[int], entry: Entry) -> list[float]:
    params = entry.params
    logits = naive_logits(raw, tokens, entry)
    if params.temperature == 0:
        best = logits.index(max(logits))
        return [float(t == best) for t in range(len(logits))]
    probabilities = softmax([x / params.temperature for x in logits])
    probabilities = [p if p >= params.min_p * max(probabilities) else 0.0 for p in probabilities]
    if 0 < params.top_k < len(probabilities):
        last = sorted(probabilities, reverse=True)[params.top_k - 1]
        probabilities = [p if p >= last else 0.0 for p in probabilities]
    whole = math.fsum(probabilities)
    probabilities = [p / whole for p in probabilities]
    if params.top_p < 1:
        held, last = 0.0, 0.0
        for p in sorted(probabilities, reverse=True):
            held, last = held + p, p
            if held >= params.top_p:
                break
        probabilities = [p if p >= last else 0.0 for p in probabilities]
    whole = math.fsum(probabilities)
    return [p / whole for p in probabilities]


TORCH: Kernels = TorchKernels()


def backends() -> list[Kernels]:
    try:
        return [TORCH, select("cpp", torch.device("cpu"))]
    except KernelsUnavailable:
        return [TORCH]


every_backend = pytest.mark.parametrize("kernels", backends(), ids=lambda kernels: kernels.name)


class Bench:
    """Slots with sequences, and their sampler."""

    def __init__(
        self, entries: list[Entry], vocab: int = VOCAB, kernels: Kernels = TORCH, width: int = WIDTH
    ) -> None:
        self.history = torch.zeros(len(entries), width, dtype=torch.int32)
        self.sampler = Sampler(self.history, vocab, kernels.likeliest, kernels.choose)
        self.known: list[list[int]] = []
        for entry in entries:
            self.sampler.admit(entry)
            self.history[entry.slot, : len(entry.tokens)] = torch.tensor(entry.tokens)
            self.known.append(list(entry.tokens))

    def sample(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        positions = np.array([len(self.known[slot]) for slot in slots], dtype=np.int64)
        return self.sampler.sample(logits, np.array(slots, dtype=np.int64), positions).tolist()

    def append(self, slots: list[int], tokens: list[int]) -> None:
        for slot, token in zip(slots, tokens, strict=True):
            self.history[slot, len(self.known[slot])] = token
            self.known[slot].append(token)
        self.sampler.append(np.array(slots, dtype=np.int64), torch.tensor(tokens))


def make_entry(slot: int, tokens: tuple[int, ...], seed: int = 0, **params: Any) -> Entry:
    prompt = params.pop("prompt_tokens", len(tokens))
    eos = frozenset(params.pop("eos", ()))
    return Entry(slot, f"r{slot}", tokens, prompt, SamplingParams(**params), seed, eos, ())


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def modified(logits: torch.Tensor, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The distribution that one row is really drawn from."""
    caught: list[torch.Tensor] = []

    def spy(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        caught.append(probabilities / probabilities.sum(-1, keepdim=True))
        return torch.zeros(len(probabilities), dtype=torch.int64)

    monkeypatch.setattr("headrace.compute.sampling.choice.draw", spy)
    Bench([entry]).sample(logits, [0])
    return caught[0][0].tolist()


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 17},
    {"top_k": VOCAB + 9},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.6, "min_p": 0.01, "temperature": 1.4},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -0.8},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.9},
    {"logit_bias": ((3, 5.5), (299, -30.0), (0, 1.25))},
    {"allowed_token_ids": (4, 200, 299)},
    {"allowed_token_ids": (4, 200, 299), "top_k": 2, "top_p": 0.9},
    {"bad_words": ((7,), (5, 6), (9, 8), (1, 9, 8), (2, 9, 8))},
    {"min_tokens": 4, "stop_token_ids": (11, 12), "eos": (13, VOCAB + 3)},
    {"min_tokens": 4, "stop_token_ids": (11, 12), "eos": (13,), "ignore_eos": True},
    {"min_tokens": 3, "stop_token_ids": (11, 12), "eos": (13,)},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_distribution_is_the_defined_one(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (40, 41, 40, 11, 1, 9)  # three of prompt, three of output
    entry = make_entry(0, tokens, prompt_tokens=3, **params)
    logits = random_logits(1, seed=4)
    expected = naive_probabilities(logits[0].tolist(), list(tokens), entry)
    got = modified(logits, entry, monkeypatch)
    assert got == pytest.approx(expected, rel=2e-4, abs=1e-7)
    assert [p > 0 for p in got] == [p > 0 for p in expected]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_greedy_is_the_likeliest_of_the_constrained(params: dict[str, Any]) -> None:
    tokens = (40, 41, 40, 11, 1, 9)
    entry = make_entry(0, tokens, prompt_tokens=3, **{**params, "temperature": 0.0})
    logits = random_logits(1, seed=4)
    expected = naive_probabilities(logits[0].tolist(), list(tokens), entry)
    assert Bench([entry]).sample(logits, [0]) == [expected.index(1.0)]


def test_flat_distribution_takes_the_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 5000  # more than the candidates that top-p looks at first
    logits = random_logits(1, vocab, scale=0.01)
    caught: list[torch.Tensor] = []
    monkeypatch.setattr(
        "headrace.compute.sampling.choice.draw",
        lambda p, u: caught.append(p.clone()) or torch.zeros(len(p), dtype=torch.int64),
    )
    entry = make_entry(0, (1,), top_p=0.5)
    Bench([entry], vocab).sample(logits, [0])
    kept = int((caught[0] > 0).sum())
    expected = naive_probabilities(logits[0].tolist(), [1], entry)
    assert abs(kept - sum(p > 0 for p in expected)) <= 1  # the sum of 2,500 floats decides the last one
    assert kept > 2000


@pytest.mark.parametrize("filter_", [{"top_k": 3}, {"top_p": 0.3}])
def test_ties_stay_together(filter_: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [5, 50, 100, 150, 250]] = 2.0
    got = modified(logits, make_entry(0, (1,), **filter_), monkeypatch)
    assert [t for t, p in enumerate(got) if p > 0] == [5, 50, 100, 150, 250]


def chi_square(counts: list[int], expected: list[float]) -> float:
    """Statistic over its degrees of freedom, cells of small expectation joined."""
    total = sum(counts)
    statistic, cells, rest, rest_count = 0.0, 0, 0.0, 0
    for count, p in zip(counts, expected, strict=True):
        if p * total < 8:
            rest, rest_count = rest + p * total, rest_count + count
        else:
            statistic, cells = statistic + (count - p * total) ** 2 / (p * total), cells + 1
    if rest > 0:
        statistic, cells = statistic + (rest_count - rest) ** 2 / rest, cells + 1
    return statistic / max(1, cells - 1)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 2.0, "top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02, "logit_bias": ((9, 2.0),)}],
    ids=str,
)
@pytest.mark.parametrize("by", ["seed", "position"])
@every_backend
def test_drawn_tokens_follow_the_distribution(params: dict[str, Any], by: str, kernels: Kernels) -> None:
    draws = 20_000
    entry = make_entry(0, (1, 2), **params)
    row = random_logits(1, seed=9)
    expected = naive_probabilities(row[0].tolist(), [1, 2], entry)
    counts = [0] * VOCAB
    if by == "seed":
        entries = [make_entry(slot, (1, 2), seed=slot, **params) for slot in range(500)]
        bench = Bench(entries, kernels=kernels)
        slots = np.arange(500)
        for step in range(draws // 500):
            for token in bench.sampler.sample(row.expand(500, -1), slots, np.full(500, 2 + step)).tolist():
                counts[token] += 1
    else:
        bench = Bench([entry], kernels=kernels)
        for start in range(0, draws, 500):
            positions = np.arange(start, start + 500)
            for token in bench.sampler.sample(
                row.expand(500, -1), np.zeros(500, dtype=np.int64), positions
            ).tolist():
                counts[token] += 1
    assert sum(counts) == draws
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    assert chi_square(counts, expected) < 1.9


ANY_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 5, 50]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.02]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "logit_bias": st.sampled_from([(), ((4, 3.0), (7, -50.0))]),
        "allowed_token_ids": st.sampled_from([None, tuple(range(0, VOCAB, 3))]),
        "bad_words": st.sampled_from([(), ((2,),), ((3, 6), (6, 3, 9))]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(), (0, 6)]),
        "ignore_eos": st.booleans(),
    }
)


@every_backend
@settings(max_examples=15, derandomize=True)
@given(params=st.lists(ANY_PARAMS, min_size=1, max_size=6), salt=st.integers(0, 2**32), data=st.data())
def test_neighbours_never_matter(
    kernels: Kernels, params: list[dict[str, Any]], salt: int, data: st.DataObject
) -> None:
    """A sequence among others, in any order of the batch, draws what it draws alone; and what it may draw."""
    tokens = [(3, 6, slot, 9, 3) for slot in range(len(params))]
    entries = [
        make_entry(slot, tokens[slot], seed=salt + slot, prompt_tokens=4, eos=(9,), **each)
        for slot, each in enumerate(params)
    ]
    together = Bench(entries, kernels=kernels)
    alone = [Bench([entry._replace(slot=0)], kernels=kernels) for entry in entries]
    for step in range(4):
        order = data.draw(st.permutations(range(len(entries))))
        logits = random_logits(len(entries), seed=salt + step)
        drawn = together.sample(logits[list(order)], list(order))
        for slot, token in zip(order, drawn, strict=True):
            assert alone[slot].sample(logits[slot : slot + 1], [0]) == [token]
            allowed = naive_probabilities(logits[slot].tolist(), together.known[slot], entries[slot])
            assert token >= 0
            assert allowed[token] > 0
            alone[slot].append([0], [token])
        together.append(list(order), drawn)


@settings(max_examples=30, derandomize=True)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.lists(st.integers(0, 20), max_size=12),
    st.sampled_from([0.7, 1.0, 1.6]),
)
def test_counts_kept_are_counts_recomputed(prompt: list[int], output: list[int], repetition: float) -> None:
    params = {"repetition_penalty": repetition, "frequency_penalty": 0.9, "presence_penalty": 0.3}
    kept = Bench([make_entry(0, tuple(prompt), seed=5, **params)])
    for token in output:
        kept.append([0], [token])
    counted = Bench([make_entry(0, tuple(prompt + output), seed=5, prompt_tokens=len(prompt), **params)])
    logits = random_logits(1, seed=len(output))
    assert kept.sample(logits, [0]) == counted.sample(logits, [0])
    assert torch.equal(kept.sampler._penalties.counts[0], counted.sampler._penalties.counts[0])


class Largest(TorchDispatchMode):
    """How many elements the largest tensor of ``dtype`` has that is made."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == self.dtype:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("at_once", [1, 70, 1 << 18])
def test_penalties_cost_the_tokens_that_there_are(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(penalties, "TOKENS_AT_ONCE", at_once)
    rng = np.random.default_rng(5)
    lengths = [3, 900, 40, 31, 2, 1, 80]
    entries = [
        make_entry(
            slot,
            tuple(rng.integers(0, 30, length).tolist()),
            prompt_tokens=max(1, length // 2),
            temperature=0.0,
            repetition_penalty=1.7,
            presence_penalty=0.4,
            frequency_penalty=-0.3,
        )
        for slot, length in enumerate(lengths)
    ]
    bench = Bench(entries, width=1000)
    logits = random_logits(len(lengths))
    with Largest(torch.int64) as largest:
        drawn = bench.sample(logits, list(range(len(lengths))))
    for entry, row, token in zip(entries, logits.tolist(), drawn, strict=True):
        wanted = naive_logits(row, list(entry.tokens), entry)
        assert wanted[token] == pytest.approx(max(wanted))
    assert largest.elements <= sum(lengths)


def test_a_flat_distribution_is_sorted_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, rows = 2_000, 9
    logits = random_logits(rows, vocab) * 0.1
    masses = torch.linspace(0.1, 0.99, rows, dtype=torch.float64)
    whole = logits.clone()
    filters.top_p(whole, masses)
    monkeypatch.setattr(filters, "SORTED_AT_ONCE", 2 * vocab)
    parts = logits.clone()
    with Largest(torch.float64) as largest:
        filters.top_p(parts, masses)
    assert torch.equal(whole, parts)
    kept = logits.softmax(-1).double().masked_fill(parts == -torch.inf, 0).sum(-1)
    assert (kept >= masses - 1e-6).all()
    assert largest.elements <= 2 * vocab


def test_lanes_of_counts_are_reused_and_never_leak() -> None:
    bench = Bench([make_entry(slot, (slot,), frequency_penalty=1.0) for slot in range(9)])
    lanes = len(bench.sampler._penalties.counts)
    bench.append([4], [7])
    bench.sampler.admit(make_entry(4, (1,)))
    bench.sampler.admit(make_entry(2, (1,), frequency_penalty=1.0))
    bench.sampler.admit(make_entry(4, (1,), frequency_penalty=1.0))
    assert len(bench.sampler._penalties.counts) == lanes
    assert int(bench.sampler._penalties.counts.sum()) == 0


@every_backend
def test_given_logits_are_never_changed(kernels: Kernels) -> None:
    params = {"logit_bias": ((1, 5.0),), "presence_penalty": 1.0, "top_k": 3, "min_p": 0.1, "top_p": 0.9}
    entries = [make_entry(0, (1,), **params), make_entry(1, (1,), temperature=0.0), make_entry(2, (1,))]
    bench = Bench(entries, kernels=kernels)
    for slots in ([0], [1], [2], [0, 1], [2, 1], [2, 0], [0, 1, 2]):
        logits = random_logits(len(slots))
        before = logits.clone()
        bench.sample(logits, slots)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_backend
def test_faults_are_distinguished_and_stay_in_their_row(temperature: float, kernels: Kernels) -> None:
    forbidding = {"allowed_token_ids": (8,), "bad_words": ((8,),)}
    bench = Bench(
        [
            make_entry(0, (1,), temperature=temperature),
            make_entry(1, (1,), temperature=temperature),
            make_entry(2, (1,), temperature=temperature, **forbidding),
            make_entry(3, (1,), temperature=temperature, top_k=3, top_p=0.5, min_p=0.1),
        ],
        kernels=kernels,
    )
    logits = random_logits(4)
    clean = bench.sample(logits, [0, 1, 2, 3])
    assert clean[2] == NOTHING_ALLOWED
    logits[1, 17] = math.nan
    logits[3, 5] = math.inf
    spoilt = bench.sample(logits, [0, 1, 2, 3])
    assert spoilt == [clean[0], NOT_FINITE, NOTHING_ALLOWED, NOT_FINITE]


@every_backend
def test_tiny_temperature_is_greedy_and_extremes_stay_finite(kernels: Kernels) -> None:
    logits = random_logits(3, scale=1000.0)
    temperatures = (1e-9, 1e-5, 100.0)
    entries = [make_entry(slot, (1,), temperature=t) for slot, t in enumerate(temperatures)]
    bench = Bench(entries, kernels=kernels)
    drawn = bench.sample(logits, [0, 1, 2])
    assert drawn[:2] == logits[:2].argmax(-1).tolist()
    assert drawn[2] >= 0


def test_seeds_of_any_size_are_taken() -> None:
    for seed in (-1, 2**63, 2**70 + 3, 0):
        assert Bench([make_entry(0, (1,), seed=seed)]).sample(random_logits(1), [0])[0] >= 0


GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def table(seeds: int, positions: int) -> np.ndarray:
    grid = np.meshgrid(np.arange(seeds, dtype=np.uint64), np.arange(positions), indexing="ij")
    return uniforms(grid[0].ravel(), grid[1].ravel()).reshape(seeds, positions)


def test_equals_the_definition_in_plain_integers() -> None:
    # mix(GAMMA) is the first output of SplitMix64 seeded with 0, as published.
    assert mix(GAMMA) == 0xE220A8397B1DCDAF
    for seed in (0, 1, 12345, MASK):
        for position in (0, 1, 77, 1 << 40):
            expected = mix((mix((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK) >> 12
            got = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))
            assert float(got[0]) == expected * 2.0**-52


def test_uniform_and_independent_along_both_axes() -> None:
    values = table(400, 400)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 1600) ** 2 / 1600).sum() / 99 < 1.5
    for a, b in (
        (values[:, :-1], values[:, 1:]),
        (values[:-1], values[1:]),
        (values[:-1, 1:], values[1:, :-1]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    assert len(np.unique(values)) == values.size
