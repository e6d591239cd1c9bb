"""The built-in model written as a GGUF file: the same texts, through every way in that a folder has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from headrace.api.compile.model import Dialect
from headrace.compute.model.hub import resolve_folder
from headrace.config import ConfigError, ModelOptions, Options, options
from headrace.core.request import SamplingParams
from headrace.fleet.messages import identity
from headrace.llm.offline import LLM
from headrace.text.tokenizer import TokenizerError
from headrace.wiring.caches import _weights
from headrace.wiring.embedding import load_pooling
from headrace.wiring.loading.text import load_text
from headrace.wiring.model import load, served_names
from tests.compute.model.gguf.files import Entry, plain, write
from tests.text.vocabularies import metadata

BUILTIN = resolve_folder("builtin")
CONFIG = json.loads((BUILTIN / "config.json").read_text())
PLAIN_TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["Once upon a time", "The old man and", "One day a little girl"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def values(**others: Any) -> dict[str, Any]:
    """The metadata of the built-in model; ``tokenizer.ggml.pre`` is none of its own, so its words are others."""
    from headrace.text.tokenizer import Tokenizer

    sizes = {
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "block_count": CONFIG["num_hidden_layers"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "attention.key_length": CONFIG["head_dim"],
        "attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "rope.freq_base": CONFIG["rope_theta"],
    }
    named = {f"llama.{name}": value for name, value in sizes.items()}
    ids = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.add_bos_token": True,
    }
    texts = {"tokenizer.chat_template": PLAIN_TEMPLATE, "general.sampling.temp": 0.5}
    tokens = metadata(Tokenizer.from_folder(BUILTIN).backend, "gpt-2")
    return {"general.architecture": "llama", **named, **tokens, **ids, **texts, **others}


def tensors() -> list[Entry]:
    made = []
    for name, tensor in load_file(BUILTIN / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        block, _, own = stem.removeprefix("model.layers.").partition(".")
        stored = (
            f"blk.{block}.{NAMES[own]}.weight"
            if stem.startswith("model.layers.")
            else f"{NAMES[stem]}.weight"
        )
        rows = tensor.float().numpy()
        if own in ("self_attn.q_proj", "self_attn.k_proj"):  # neighbours rotate, instead of halves
            rows = (
                rows.reshape(-1, 2, CONFIG["head_dim"] // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
            )
        made.append(plain(stored, np.ascontiguousarray(rows)))
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf", values(), tensors())


def of(model: Path | str, **others: Any) -> Options:
    small = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
    return options({"model": str(model), **small, **others})


def texts(model: str, **others: Any) -> list[str]:
    small: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}
    with LLM(model, **small, **others) as llm:
        return [answer.outputs[0].text for answer in llm.generate(PROMPTS, GREEDY)]


def test_the_texts_are_those_of_the_folder(path: Path) -> None:
    assert texts(str(path), tokenizer="builtin") == texts("builtin")


def test_drafts_of_a_file_do_not_change_the_texts(path: Path) -> None:
    draft = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}
    assert texts(str(path), speculative_config=draft) == texts(str(path))


def test_the_name_is_that_of_the_file(path: Path) -> None:
    assert served_names(ModelOptions(model=str(path))) == ("tiny-F32",)
    assert served_names(ModelOptions(model="org/name-GGUF:Q4_K_M")) == ("org/name-GGUF:Q4_K_M",)
    assert served_names(ModelOptions(model=str(path), served_model_name=("other",))) == ("other",)


def test_text_comes_from_the_file_or_from_the_tokenizer_that_is_named(path: Path) -> None:
    own = load_text(ModelOptions(model=str(path)), "auto")
    assert own.path == path
    assert own.tokenizer.eos_token_ids == {7, 2}
    assert own.tokenizer.encode("a")[0] == own.tokenizer.bos_token_id == 1
    assert own.template.templates["default"] == PLAIN_TEMPLATE
    assert (own.defaults.params.temperature, own.defaults.source) == (0.5, str(path))
    other = load_text(ModelOptions(model=str(path), tokenizer="builtin", generation_config="vllm"), "auto")
    assert other.template.templates["default"] != PLAIN_TEMPLATE
    assert other.defaults.params.temperature == 1.0
    assert load_text(ModelOptions(model="builtin", tokenizer=str(path)), "auto").tokenizer.encode("a b") == (
        own.tokenizer.encode("a b")
    )


def test_a_template_of_a_file_gets_tools(path: Path) -> None:
    found = load_text(ModelOptions(model=str(path)), "auto").template
    assert Dialect(found).knows_tools(None)
    hermes = Dialect(load_text(ModelOptions(model=str(path)), "hermes").template, "hermes")
    assert hermes.knows_tools(None)


def test_a_folder_with_one_file_is_that_file(path: Path) -> None:
    assert load_text(ModelOptions(model=str(path.parent)), "auto").path == path


def test_a_loaded_file_is_told_apart_from_others(path: Path, tmp_path: Path) -> None:
    other = write(tmp_path / path.name, values(**{"general.name": "other"}), tensors())
    loaded = load(of(path))
    assert _weights(loaded) != _weights(load(of(other)))
    assert identity(path) != identity(other)


def test_what_a_file_cannot_do_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--embedding-model: .* is a GGUF file; embeddings and scores need"
    ):
        load_pooling(of("builtin", embedding_model=str(path)))
    unknown = write(tmp_path / "unknown.gguf", values(**{"tokenizer.ggml.pre": "x"}), tensors()[:1])
    with pytest.raises(
        TokenizerError, match=r"unknown\.gguf: tokenizer\.ggml\.pre is 'x', which is not known"
    ):
        load_text(ModelOptions(model=str(unknown)), "auto")
    with pytest.raises(ConfigError, match="--model-impl transformers: only native families read GGUF files"):
        load(of(path, model_impl="transformers"))
    with pytest.raises(ConfigError, match=r"gone\.gguf does not exist"):
        load(of(tmp_path / "gone.gguf"))
