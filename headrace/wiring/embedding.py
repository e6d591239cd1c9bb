"""Loads the models for embeddings, reranking and scores: encoders, decoders, or the served decoder itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.compute.checkpoint import ModelError
from headrace.compute.device import (
    apart,
    device_facts,
    freeing_at_once,
    limit_threads,
    resolve_device,
    resolve_dtype,
)
from headrace.compute.encoder.families import is_encoder
from headrace.compute.encoder.models import (
    BATCH_TOKENS,
    CrossEncoder,
    EmbeddingModel,
    Sentence,
    TextTokenizer,
    is_cross_encoder,
    read_cross_encoder,
    read_embedding_model,
    read_sentence,
)
from headrace.compute.encoder.models import run as run_whole
from headrace.compute.encoder.networks import BLOCK_SIZE, CausalEncoder
from headrace.compute.encoder.sentences import PACKAGED, encoder_folder
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder, ModelDecoder
from headrace.compute.model.families import FAMILIES, parse_config
from headrace.compute.model.gguf.file import is_gguf
from headrace.compute.model.hub import read_config, resolve_model
from headrace.compute.model.weights import load_weights
from headrace.config import ConfigError, ModelOptions, Options
from headrace.core.embedding import TokenRow
from headrace.service.embedding_models import PoolingModel, PoolingModels
from headrace.wiring.model import Loaded, served_names

MAX_TOKENS = 8192
"""Maximum tokens of an input of a decoder, which limits the memory of its keys and values."""


@freeing_at_once()
def read_causal_model(name: str, folder: Path, options: ModelOptions) -> EmbeddingModel:
    """The decoder in a folder as an embedding model, pooled at the last token unless its files say otherwise.

    Raises:
        ModelError: the model is not supported.
        ConfigError: the device does not support the dtype.
    """
    sentence = read_sentence(folder, pooling="last")
    spec = parse_config(_generating(read_config(folder)))
    device = resolve_device(options.device)
    choice = resolve_dtype(options.dtype, spec.dtype, device_facts(device), quantized=bool(spec.stored))
    weights = load_weights(folder, spec, choice.dtype, device, head=False)
    # No logits are computed, so no copy of the table is prepared.
    weights.head = weights.embedding[:1].clone()
    most = _max_tokens(sentence, spec.max_positions)
    decoder = Decoder(spec, weights, select(options.kernels, device, dtype=choice.dtype), most)
    return share_decoder(name, folder, decoder, most)


def share_decoder(name: str, folder: Path, decoder: ModelDecoder, max_model_len: int) -> EmbeddingModel:
    """An embedding model over a loaded decoder, for inputs of at most ``max_model_len`` tokens.

    Raises:
        ModelError: the model is not supported.
    """
    if decoder.shape.state_bytes:
        raise ModelError(f"{decoder.shape.architecture} keeps recurrent states of running sequences only")
    sentence = read_sentence(folder, pooling="last")
    most = _max_tokens(sentence, max_model_len)
    batch = max(BATCH_TOKENS[decoder.device.type], -(-most // BLOCK_SIZE) * BLOCK_SIZE)
    kernels = decoder.kernels
    return EmbeddingModel(
        name,
        CausalEncoder(decoder, batch),
        TextTokenizer.from_folder(folder, sentence.lower_case),
        sentence,
        most,
        [each.read(kernels, decoder.device) for each in sentence.dense],
    )


def _max_tokens(sentence: Sentence, limit: int) -> int:
    return min(sentence.max_tokens or limit, limit, MAX_TOKENS)


def _generating(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the name of the architecture with a head, instead of the one without."""
    names = config.get("architectures")
    whole = (
        [str(name).removesuffix("Model") + "ForCausalLM" for name in names] if isinstance(names, list) else []
    )
    known = [name for name in whole if name in FAMILIES]
    return {**config, "architectures": known} if known else dict(config)


class _Names(NamedTuple):
    """The models that the options name, and the option of each."""

    embedding: str | None
    embedding_option: str
    rerank: str | None
    rerank_option: str


def runs_pooling(options: ModelOptions) -> bool:
    """Whether MODEL is for embeddings or scores instead of text generation.

    Raises:
        ConfigError: the model does not exist.
    """
    if options.runner != "auto":
        return options.runner == "pooling"
    if options.model == PACKAGED:
        return True
    try:
        folder = resolve_model(options.model, options.revision, with_weights=False)
        config = read_config(folder)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return is_encoder(config) or (folder / "modules.json").is_file()


def load_pooling(options: Options) -> PoolingModels:
    """The models with their own weights; `with_served` adds the served decoder, if it is one of them.

    Raises:
        ConfigError: a model cannot be loaded; the message names its option.
    """
    if runs_pooling(options.model) and options.adapters.enable_lora:
        raise ConfigError("--enable-lora: models of embeddings and scores take no adapters; omit this option")
    names = _names(options)
    _check_one_process(names, options)
    embedding: EmbeddingModel | None = None
    rerank: CrossEncoder | None = None
    if names.embedding is not None and not _is_served(names.embedding, options):
        embedding = apart(lambda: _embedding(names, options))
    if names.rerank is not None:
        rerank = apart(lambda: _rerank(names, options))
    name, *also_named = served_names(options.model) if runs_pooling(options.model) else ("",)
    return PoolingModels(embedding, rerank, {name: also_named} if also_named else {})


def with_served(models: PoolingModels, options: Options, loaded: Loaded) -> PoolingModels:
    """``models``, with the served decoder as the embedding model if the options name it for that.

    Raises:
        ConfigError: it cannot be used.
    """
    name = options.embedding.embedding_model
    if name is None or not _is_served(name, options):
        return models
    try:
        folder = _in_safetensors(loaded.folder, "--embedding-model")
        shared = share_decoder(loaded.name, folder, loaded.decoder, loaded.ledger.max_model_len)
    except ModelError as error:
        raise ConfigError(f"--embedding-model: {error}") from error
    apart(lambda: _warm(shared))
    also_named = served_names(options.model)[1:]
    return PoolingModels(shared, models.rerank, {loaded.name: also_named} if also_named else {})


def tokenizer_text(model: PoolingModel) -> tuple[str, bool]:
    """What `TextTokenizer.from_text` needs for the tokenizer of a model."""
    assert isinstance(model.tokenizer, TextTokenizer)
    return model.tokenizer.text(), model.tokenizer.lower_case


def _check_one_process(names: _Names, options: Options) -> None:
    """Raise `ConfigError` if an embedding model would have to be divided among ranks."""
    sizes = options.model.tensor_parallel_size, options.model.pipeline_parallel_size
    if sizes == (1, 1):
        return
    flag = "--tensor-parallel-size" if sizes[0] > 1 else "--pipeline-parallel-size"
    if runs_pooling(options.model):
        raise ConfigError(f"{flag}: models of embeddings and scores run in one process; leave the option out")
    if names.embedding is not None and _is_served(names.embedding, options):
        raise ConfigError(
            f"--embedding-model: the served model is divided among ranks ({flag}); name another model"
        )


def _names(options: Options) -> _Names:
    embedding, rerank = options.embedding.embedding_model, options.embedding.rerank_model
    names = _Names(embedding, "--embedding-model", rerank, "--rerank-model")
    if not runs_pooling(options.model):
        return names
    model = options.model.model
    cross = model != PACKAGED and is_cross_encoder(read_config(_folder(model, "MODEL")))
    if cross and rerank is None:
        return names._replace(rerank=model, rerank_option="MODEL")
    if not cross and embedding is None:
        return names._replace(embedding=model, embedding_option="MODEL")
    option = "--rerank-model" if cross else "--embedding-model"
    raise ConfigError(f"{option}: {model} is already the model for this; leave the option out")


def _is_served(name: str, options: Options) -> bool:
    """Whether the embedding model is the decoder that generates."""
    if runs_pooling(options.model):
        return False
    return _place(name, "--embedding-model") == _place(options.model.model, "MODEL", options.model.revision)


def _place(name: str, option: str, revision: str | None = None) -> Path:
    try:
        if name == PACKAGED:
            return encoder_folder(name)
        return resolve_model(name, revision).resolve()
    except ModelError as error:
        raise ConfigError(f"{option}: {error}") from error


def _folder(name: str, option: str) -> Path:
    return _in_safetensors(_place(name, option), option)


def _in_safetensors(path: Path, option: str) -> Path:
    if is_gguf(path):
        raise ConfigError(
            f"{option}: {path} is a GGUF file; embeddings and scores need a model in safetensors"
        )
    return path


def _embedding(names: _Names, options: Options) -> EmbeddingModel:
    assert names.embedding is not None
    folder = _folder(names.embedding, names.embedding_option)
    name = _api_name(names.embedding, names.embedding_option, options)
    try:
        limit_threads()
        if is_encoder(read_config(folder)):
            model = read_embedding_model(name, folder, resolve_device(options.model.device))
        else:
            model = read_causal_model(name, folder, options.model)
        _warm(model)
        return model
    except ModelError as error:
        raise ConfigError(f"{names.embedding_option}: {error}") from error


def _rerank(names: _Names, options: Options) -> CrossEncoder:
    assert names.rerank is not None
    folder = _folder(names.rerank, names.rerank_option)
    name = _api_name(names.rerank, names.rerank_option, options)
    try:
        limit_threads()
        model = read_cross_encoder(name, folder, resolve_device(options.model.device))
    except ModelError as error:
        raise ConfigError(f"{names.rerank_option}: {error}") from error
    _warm(model)
    return model


def _api_name(name: str, option: str, options: Options) -> str:
    """A model's name in the API: the hub name, or the name of its folder."""
    if option == "MODEL":
        return served_names(options.model)[0]
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def _warm(model: EmbeddingModel | CrossEncoder) -> None:
    """Compute one input, so that one-time costs do not delay the first request."""
    run_whole(model.run([TokenRow((0,))]))
