"""The one capacity function: start-up sizing, admission, preemption and planning all ask it."""

from __future__ import annotations

from headrace.core.request import Request


def blocks_needed(tokens: int, block_size: int) -> int:
    """Blocks that hold the keys and values of ``tokens`` positions."""
    return -(-tokens // block_size)


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
