import pytest

from headrace.core.request import SamplingParams
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheDirectives, classify


def ask(control: CacheDirectives = NO_DIRECTIVES, **params):
    allowed = classify(SamplingParams(**params), control)
    return allowed.exact, allowed.semantic, allowed.coalesce


@pytest.mark.parametrize(
    ("params", "control", "allowed"),
    [
        ({"temperature": 0.0}, NO_DIRECTIVES, (True, True, True)),
        ({"temperature": 0.0, "seed": 3}, NO_DIRECTIVES, (True, True, True)),
        ({"temperature": 1.0, "seed": 3}, NO_DIRECTIVES, (True, False, True)),
        ({"temperature": 1.0}, NO_DIRECTIVES, (False, False, False)),
        ({"temperature": 1.0, "top_k": 1}, NO_DIRECTIVES, (False, False, False)),
        ({"temperature": 1.0}, CacheDirectives(samples=4), (True, False, False)),
        ({"temperature": 0.0}, CacheDirectives(samples=4), (True, True, True)),
        ({"temperature": 1.0, "seed": 3}, CacheDirectives(samples=4), (True, False, True)),
        ({"temperature": 0.0, "logprobs": 2}, NO_DIRECTIVES, (True, False, True)),
        ({"temperature": 0.0, "prompt_logprobs": 0}, NO_DIRECTIVES, (False, False, False)),
        ({"temperature": 0.0}, CacheDirectives(no_store=True), (False, False, False)),
        ({"temperature": 0.0}, CacheDirectives(no_cache=True), (True, False, False)),
        ({"temperature": 0.0}, CacheDirectives(only_if_cached=True), (True, True, True)),
    ],
)
def test_the_table(params, control, allowed):
    assert ask(control, **params) == allowed


def test_only_unseeded_samples_go_into_a_pool():
    def pool(**params):
        return classify(SamplingParams(**params), CacheDirectives(samples=4)).pool

    assert pool(temperature=1.0) == 4
    assert pool(temperature=0.0) == pool(temperature=1.0, seed=1) == 0
    assert pool(temperature=1.0, prompt_logprobs=1) == 0


def test_what_is_forbidden_says_why():
    assert classify(SamplingParams(), NO_DIRECTIVES).why == "sampled without a seed"
    assert classify(SamplingParams(temperature=0.0), NO_DIRECTIVES).why == ""
