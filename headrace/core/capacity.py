"""How much fits, said once: start-up sizing, admission, preemption, the planner and the simulator all ask here."""

from __future__ import annotations

from headrace.core.request import Request

_SAMPLER_COPIES = 4
"""Float32 copies of the logits that sampling may hold at once (shaped rows, probabilities, sorted candidates)."""


def blocks_needed(tokens: int, block_size: int) -> int:
    """Blocks that hold the keys and values of ``tokens`` positions."""
    return -(-tokens // block_size)


def activation_bytes(
    *,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    itemsize: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """An upper estimate of a step's activations beside weights and cache, in bytes.

    Per token: residual, its normed copy, attention in and out (8 hidden widths at the widest moment) and the
    gate-up pair with its product (3 intermediate widths). Per sequence: the logits and what sampling makes of
    them, in float32.
    """
    per_token = (8 * hidden_size + 3 * intermediate_size) * itemsize
    per_sequence = (1 + _SAMPLER_COPIES) * vocab_size * 4
    return max_num_batched_tokens * per_token + min(max_num_seqs, max_num_batched_tokens) * per_sequence


def why_never(request: Request, max_model_len: int, num_blocks: int, block_size: int) -> str:
    """Why a request could not be served even alone; empty when it could."""
    prompt = len(request.tokens)
    if not prompt:
        return "the prompt is empty"
    if prompt >= max_model_len:
        return (
            f"the prompt has {prompt} tokens; with room for one more token the limit is {max_model_len - 1}"
        )
    asked = request.params.max_tokens
    needed = blocks_needed(max_model_len if asked is None else min(max_model_len, prompt + asked), block_size)
    if needed > num_blocks:
        return f"the request may need {needed} blocks of keys and values; there are {num_blocks}"
    return ""
