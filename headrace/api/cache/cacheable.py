"""How each request field enters the cache key: one row per field.

A request that sets a field without a row is not cached. So a new field cannot cause wrong hits, and a test fails until
the field has a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache

from headrace.api.wire import Wire


class Way(StrEnum):
    """How a field enters the cache key, or why it does not."""

    TOKENS = "tokens"  # changes the prompt's tokens
    SAMPLING = "sampling"  # enters the sampling parameters or the seed
    SCOPE = "scope"  # separates tenants, users and salts
    SHOWN = "shown"  # changes only how a response is written
    CONTROL = "control"  # a cache directive
    INERT = "inert"  # cannot change the response


WAYS: Mapping[str, Way] = {
    # the prompt
    "messages": Way.TOKENS,
    "prompt": Way.TOKENS,
    "suffix": Way.TOKENS,
    "add_generation_prompt": Way.TOKENS,
    "continue_final_message": Way.TOKENS,  # also in the key itself, because of the space before the first word
    "chat_template": Way.TOKENS,
    "chat_template_kwargs": Way.TOKENS,
    "tools": Way.TOKENS,  # also decide how an output is parsed; a replay parses it again
    "reasoning_effort": Way.TOKENS,
    "add_special_tokens": Way.TOKENS,
    "truncate_prompt_tokens": Way.TOKENS,
    # sampling
    "temperature": Way.SAMPLING,
    "top_p": Way.SAMPLING,
    "top_k": Way.SAMPLING,
    "min_p": Way.SAMPLING,
    "max_tokens": Way.SAMPLING,
    "max_completion_tokens": Way.SAMPLING,
    "min_tokens": Way.SAMPLING,
    "stop": Way.SAMPLING,
    "stop_token_ids": Way.SAMPLING,
    "include_stop_str_in_output": Way.SAMPLING,
    "ignore_eos": Way.SAMPLING,
    "seed": Way.SAMPLING,
    "presence_penalty": Way.SAMPLING,
    "frequency_penalty": Way.SAMPLING,
    "repetition_penalty": Way.SAMPLING,
    "logit_bias": Way.SAMPLING,
    "allowed_token_ids": Way.SAMPLING,
    "bad_words": Way.SAMPLING,
    "skip_special_tokens": Way.SAMPLING,
    "logprobs": Way.SAMPLING,
    "top_logprobs": Way.SAMPLING,
    "prompt_logprobs": Way.SAMPLING,
    "response_format": Way.SAMPLING,
    "structured_outputs": Way.SAMPLING,
    "guided_json": Way.SAMPLING,
    "guided_regex": Way.SAMPLING,
    "guided_choice": Way.SAMPLING,
    "guided_grammar": Way.SAMPLING,
    "tool_choice": Way.SAMPLING,  # a required call is a grammar
    "parallel_tool_calls": Way.SAMPLING,  # whether that grammar, or the output, allows several calls
    "thinking_token_budget": Way.SAMPLING,  # a part of the constraint
    "best_of": Way.SAMPLING,  # requests logprobs; the choice among candidates is made again
    # scope
    "model": Way.SCOPE,
    "user": Way.SCOPE,
    "cache_salt": Way.SCOPE,
    # output format
    "n": Way.SHOWN,  # each choice has its own seed and its own key
    "echo": Way.SHOWN,
    "stream": Way.SHOWN,
    "stream_options": Way.SHOWN,
    "return_token_ids": Way.SHOWN,
    "include_reasoning": Way.SHOWN,
    "include_cost": Way.SHOWN,
    "response_cache": Way.CONTROL,
    "priority": Way.INERT,
    "service_tier": Way.INERT,
    "slo": Way.INERT,
    "deadline_ms": Way.INERT,
    "retention": Way.INERT,
    "prompt_cache_key": Way.INERT,
    "prompt_cache_retention": Way.INERT,
    "kv_transfer_params": Way.INERT,  # a cached response needs no blocks of another server
    "prediction": Way.INERT,
    "session_id": Way.INERT,
    "agent_hint": Way.INERT,
    "request_id": Way.INERT,
    "metadata": Way.INERT,
}


def unknown_field(body: Wire) -> str:
    """The first field that ``body`` sets and that has no row; empty if there is none."""
    return next((name for name in _rowless(type(body)) if name in body.model_fields_set), "")


@cache
def _rowless(form: type[Wire]) -> tuple[str, ...]:
    return tuple(sorted(form.model_fields.keys() - WAYS.keys()))
