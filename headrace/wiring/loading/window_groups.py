"""Whether the window layers of a loaded model form groups that give blocks back."""

from __future__ import annotations

from headrace.compute.model.decoder import Decoder
from headrace.compute.model.window_groups import LEAST_GAIN, LayerGroups, gain, layer_groups
from headrace.config import Options
from headrace.wiring.loading.computing import Computing
from headrace.wiring.loading.draft_models import reads_states


def layer_groups_here(computing: Computing, options: Options, chunk: int) -> LayerGroups | str:
    """The groups of window layers, or why there are none; empty if the model has no such layers."""
    shape, cache = computing.shape, options.cache
    if all(layer.window is None for layer in shape.layers):
        return ""
    problems = {
        "the option is off": not cache.enable_window_groups,
        "they are computed on a CPU only": computing.device.type != "cpu",
        "transformers' implementation has no groups": not isinstance(computing.decoder, Decoder),
        "the model is in parts": computing.place.size > 1,
        "KV blocks have a tier in host memory or on disk": bool(
            cache.kv_offload_bytes or cache.kv_offload_path is not None
        ),
        "KV blocks are exchanged with other servers": cache.kv_transfer_config is not None,
        "a head drafts": reads_states(options.scheduler),
    }
    why = next((name for name, applies in problems.items() if applies), "")
    groups = why or layer_groups(shape, chunk)
    if (
        not isinstance(groups, str)
        and gain(groups, shape, computing.max_model_len, cache.block_size) < LEAST_GAIN
    ):
        groups = "groups would save little at this --max-model-len"
    return f"all tokens are kept in window layers: {groups}" if isinstance(groups, str) else groups
