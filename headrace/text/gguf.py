"""The tokenizer and the chat templates that the metadata of a GGUF file describes.

The file stores the vocabulary, the type of each token, and the merges (``gpt2``: byte-level BPE) or scores (``llama``:
SentencePiece). For the rules that cut a text into words before the merges it stores only a name
(``tokenizer.ggml.pre``). `CUTS` has the rules of each name, as the original tokenizers have them. Other rules give
other tokens, so an unknown name is refused. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

It receives the metadata as a mapping; it does not read files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from headrace.text.named_tokens import turn_ends
from headrace.text.tokenizer import Tokenizer, TokenizerError

Metadata = Mapping[str, Any]

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"


class _Type(IntEnum):
    """What a token is. Text never becomes an unused token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a byte-level tokenizer prepares a text.

    Args:
        splits: regular expressions; each one cuts the pieces of those before it, and keeps everything.
        nfc: texts are normalized to Unicode's form C.
        whole_words: a word that is in the vocabulary is one token, whatever the merges say.
        begins: the bos token is put first if the file does not say (``add_bos_token``).
    """

    splits: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    + _CASED_REST
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}" + _CASED_REST
)
_DEEPSEEK_LETTERS = (
    r"\s?["
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}"
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}"
    r"\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}"
    r"\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}"
    r"\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}"
    r"\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}"
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}"
    r"\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}"
    r"\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}"
    r"\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}"
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}"
    r"\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
    r"]+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    _DEEPSEEK_LETTERS,
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    _DIGIT,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    _DIGIT,
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_LLAMA3 = Cuts((_CL100K,), whole_words=True, begins=True)
_DIGITS = Cuts((_DIGIT, _GPT2))

CUTS: dict[str, Cuts] = {
    "command-r": Cuts((_DIGIT, _GPT2), nfc=True),
    "dbrx": Cuts((_CL100K,)),
    "deepseek-coder": Cuts(_DEEPSEEK_CODER),
    "deepseek-llm": Cuts(_DEEPSEEK_LLM),
    "deepseek-r1-qwen": Cuts((_QWEN2,), nfc=True),
    "deepseek-v3": Cuts(_DEEPSEEK_V3),
    "gpt-2": Cuts((_GPT2,)),
    "gpt-4o": Cuts((_O200K,)),
    "granite-docling": Cuts((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": Cuts((_O200K,)),
    "phi-2": Cuts((_GPT2,)),
    "qwen2": Cuts((_QWEN2,), nfc=True),
    "qwen35": Cuts((_QWEN35,), nfc=True),
    "refact": _DIGITS,
    "smaug-bpe": Cuts((_CL100K,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": Cuts((_TEKKEN,), whole_words=True, begins=True),
}
"""By the names of ``tokenizer.ggml.pre``."""


class _Vocabulary(NamedTuple):
    """The tokens by id, their types, and their ids."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int]

    def of(self, *types: _Type) -> Iterator[tuple[int, str]]:
        """The ids and strings of the tokens of some types."""
        return ((id, text) for id, text in enumerate(self.tokens) if self.types[id] in types)


def read_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer of a model.

    Raises:
        TokenizerError: it is of a kind or has cutting rules that are not known, or its metadata contradict each other.
    """
    kind = _one(metadata, "model", str)
    if kind not in _KINDS:
        raise TokenizerError(
            f"{_KEY}model {kind!r:.80} is not supported; supported are: {', '.join(_KINDS)}; give the original"
            " model in safetensors, or --tokenizer FOLDER"
        )
    vocabulary = _vocabulary(metadata)
    try:
        backend, begins = _KINDS[kind](metadata, vocabulary)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception, for merges that do not fit the vocabulary
        raise TokenizerError(f"{_KEY}tokens and merges make no tokenizer: {error}") from error
    _add_tokens(backend, vocabulary, strip=metadata.get("general.architecture") == "phi3" and kind == "llama")
    roles = _roles(metadata, vocabulary)
    _add_processor(backend, metadata, roles, begins)
    return Tokenizer(backend, roles, _end_ids(metadata, vocabulary))


def read_templates(metadata: Metadata) -> dict[str, str]:
    """The chat templates by name; ``default`` is the one without a name. Empty: the model has none.

    Raises:
        TokenizerError: one is not a text.
    """
    found = {}
    for key, value in metadata.items():
        name = "default" if key == _TEMPLATE else key.removeprefix(f"{_TEMPLATE}.")
        if name == key:
            continue
        if not isinstance(value, str):
            raise TokenizerError(f"{key} must be a text")
        found[name] = value
    return found


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether its texts begin with the bos token unless the file says otherwise."""
    name = _one(metadata, "pre", str, "")
    cuts = CUTS.get(name)
    if cuts is None:
        said = f"is {name!r:.80}, which is not known" if name else "is missing"
        raise TokenizerError(
            f"{_KEY}pre {said}, and other rules give other tokens; known are: {', '.join(CUTS)}; give"
            " --tokenizer FOLDER, or convert the model again with a current converter"
        )
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, _stored_merges(metadata), ignore_merges=cuts.whole_words)
    )
    if cuts.nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in cuts.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, cuts.begins


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    prefix = _one(metadata, "add_space_prefix", bool, True)
    return _spaced(metadata, vocabulary, _scored_merges(metadata, vocabulary), prefix), True


def _gemma4(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    prefix = _one(metadata, "add_space_prefix", bool, False)
    return _spaced(metadata, vocabulary, _stored_merges(metadata), prefix), True


_KINDS: dict[str, Callable[[Metadata, _Vocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}
"""By ``tokenizer.ggml.model``."""


def _spaced(
    metadata: Metadata, vocabulary: _Vocabulary, merges: list[tuple[str, str]], prefix: bool
) -> tokenizers.Tokenizer:
    """A BPE tokenizer over characters that writes spaces as ``▁`` and unknown characters as bytes."""
    unknown = next((text for _, text in vocabulary.of(_Type.UNKNOWN)), None)
    if (id := _id(metadata, "unknown_token_id", vocabulary)) is not None:
        unknown = vocabulary.tokens[id]
    model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", left=1)] if prefix else []),
        ]
    )
    return backend


def _stored_merges(metadata: Metadata) -> list[tuple[str, str]]:
    merges = []
    for each in _many(metadata, "merges", str):
        left, space, right = each[1:].partition(" ")  # a part may itself begin with a space
        if not space:
            raise TokenizerError(
                f"{_KEY}merges has {each!r:.80}, which is not two tokens with a space between"
            )
        merges.append((each[:1] + left, right))
    return merges


def _scored_merges(metadata: Metadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of a SentencePiece model: every pair of tokens that makes a token, the best score first.

    The order among equal scores is that of transformers' converter.
    """
    scores = _many(metadata, "scores", (int, float))
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(f"{_KEY}scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    ids = {text: id for id, text in vocabulary.of(_Type.NORMAL)}
    found = []
    for text, id in ids.items():
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                found.append((-scores[id], -at, len(text), id, left, right))
    found.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, strip: bool) -> None:
    """Add the tokens that text becomes only as a whole. ``strip``: most of them take the spaces after them along.

    Phi-3 does so, and its files do not say it.
    """
    plain = {"<unk>", "<s>", "<|endoftext|>"}
    special = [
        AddedToken(text, normalized=False, special=True, rstrip=strip and text not in plain)
        for _, text in vocabulary.of(_Type.CONTROL, _Type.UNKNOWN)
    ]
    defined = [
        AddedToken(text, normalized=False, special=False, rstrip=strip)
        for id, text in vocabulary.of(_Type.USER_DEFINED)
        if text != f"[PAD{id}]"  # converters fill the rows of the embedding up with these
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(defined)


def _roles(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, str]:
    """The strings of the special tokens that the file names, by role."""
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    found = {role: _id(metadata, key, vocabulary) for role, key in keys.items()}
    return {role: vocabulary.tokens[id] for role, id in found.items() if id is not None}


def _add_processor(
    backend: tokenizers.Tokenizer, metadata: Metadata, roles: Mapping[str, str], begins: bool
) -> None:
    """Put the bos token before texts and the eos token behind them, if the file says so."""
    bos, eos = roles.get("bos_token"), roles.get("eos_token")
    first = [bos] if _one(metadata, "add_bos_token", bool, begins) and bos is not None else []
    last = [eos] if _one(metadata, "add_eos_token", bool, False) and eos is not None else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(text, backend.token_to_id(text)) for text in dict.fromkeys([*first, *last])],
        )


def _end_ids(metadata: Metadata, vocabulary: _Vocabulary) -> list[int]:
    """The tokens that end an answer: those that the file names, and those of `turn_ends`."""
    named = [_id(metadata, f"{name}_token_id", vocabulary) for name in ("eos", "eot", "eom")]
    listed = _many(metadata, "eos_token_ids", int) if f"{_KEY}eos_token_ids" in metadata else ()
    if any(not 0 <= id < len(vocabulary.tokens) for id in listed):
        raise TokenizerError(f"{_KEY}eos_token_ids has ids outside the {len(vocabulary.tokens)} tokens")
    known = turn_ends({text: id for id, text in vocabulary.of(_Type.CONTROL)})
    return sorted({id for id in (*named, *listed, *known) if id is not None})


def _vocabulary(metadata: Metadata) -> _Vocabulary:
    tokens = _many(metadata, "tokens", str)
    types = _many(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise TokenizerError(f"{_KEY}token_type has {len(types)} entries for {len(tokens)} tokens")
    ids = {text: id for id, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(text for id, text in enumerate(tokens) if ids[text] != id)
        raise TokenizerError(f"{_KEY}tokens has {twice!r:.80} twice")
    return _Vocabulary(tokens, types, ids)


def _id(metadata: Metadata, name: str, vocabulary: _Vocabulary) -> int | None:
    if f"{_KEY}{name}" not in metadata:
        return None
    id: int = _one(metadata, name, int)
    if not 0 <= id < len(vocabulary.tokens):
        raise TokenizerError(f"{_KEY}{name} is {id}, and the vocabulary has {len(vocabulary.tokens)} tokens")
    return id


def _one(metadata: Metadata, name: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(f"{_KEY}{name}", default)
    if type(value) is not kind:
        raise TokenizerError(
            f"the model has no {_KEY}{name}"
            if value is None
            else f"{_KEY}{name} must be a {_NAMES[kind]}, got {value!r:.80}"
        )
    return value


def _many(metadata: Metadata, name: str, kind: type | tuple[type, ...]) -> Sequence[Any]:
    values = metadata.get(f"{_KEY}{name}")
    if values is None:
        raise TokenizerError(f"the model has no {_KEY}{name}")
    if (
        isinstance(values, str)
        or not isinstance(values, Sequence)
        or not all(isinstance(v, kind) for v in values)
    ):
        raise TokenizerError(
            f"{_KEY}{name} must be a list of {_NAMES[kind if isinstance(kind, type) else float]}s"
        )
    return values


_NAMES: dict[type, str] = {str: "text", int: "number", float: "number", bool: "flag"}
