"""The tokenizer: text to tokens and back, from a local model folder.

It uses only the `tokenizers` library, so that start-up does not import transformers. `text.template` renders messages
to text, `text.stream` converts a growing output to text.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from headrace.expressions import MAX_WAYS, ways
from headrace.files import check_size, read_json_file
from headrace.text.content import AddedTokens, PromptText, spelling_pattern
from headrace.text.named_tokens import BadTokens, add_named_tokens

# Tokenizes prompts in which some text spells a control token and is text nevertheless.
#
# A second tokenizer shares the model's vocabulary and merges. It knows each control token under a secret spelling only,
# and the prompt's own control tokens are spelled so. Everything else is encoded in one run, as the model would encode
# it if there were no control tokens.

SECRET_CHARACTERS = 8
_PRIVATE, _PRIVATE_SIZE = 0xF0000, 0xFFFE


class QuotingEncoder:
    """Encodes prompts like ``backend``, except for what they quote; ``added`` are tokens that a prompt may quote."""

    def __init__(self, backend: tokenizers.Tokenizer, added: AddedTokens) -> None:
        self._model = backend.model
        self._encoder = tokenizers.Tokenizer(self._model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(backend, part) is not None:
                setattr(self._encoder, part, getattr(backend, part))
        secret = "".join(chr(_PRIVATE + secrets.randbelow(_PRIVATE_SIZE)) for _ in range(SECRET_CHARACTERS))
        controls = (*added.special, *added.marks)
        self._pattern = spelling_pattern(controls)
        self._secret = {text: secret + chr(_PRIVATE + number) for number, text in enumerate(controls)}
        tokens = sorted(backend.get_added_tokens_decoder().items())
        self._encoder.add_tokens([self._respelled(token) for _, token in tokens])
        self._ids = {self._id_of(token.content): token_id for token_id, token in tokens}
        self._spelled = {
            token_id: token.content
            for token_id, token in tokens
            if token.content in self._secret and token_id not in self._ids
        }

    def encode(self, prompt: PromptText, add_special_tokens: bool = False) -> list[int]:
        """The tokens of ``prompt``."""
        encoding = self._encoder.encode("".join(self._pieces(prompt)), add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for token, around in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if around:  # a token that the post-processor adds around the text
                ids.append(token)
            elif (
                token in self._spelled
            ):  # a vocabulary of whole words finds it without looking for control tokens
                ids += [each.id for letter in self._spelled[token] for each in self._model.tokenize(letter)]
            else:
                ids.append(self._ids.get(token, token))
        return ids

    def _respelled(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        return tokenizers.AddedToken(
            self._secret.get(token.content, token.content),
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )

    def _id_of(self, spelled: str) -> int:
        found = self._encoder.token_to_id(self._secret.get(spelled, spelled))
        assert found is not None  # it was added
        return found

    def _pieces(self, prompt: PromptText) -> Iterator[str]:
        text, begun = prompt.text, 0
        for start, end in (*prompt.quoted, (len(text), len(text))):
            yield self._pattern.sub(lambda found: self._secret[found[0]], text[begun:start])
            yield text[start:end]
            begun = end


MAX_TOKENIZER_BYTES = 256 << 20
"""The largest ``tokenizer.json`` that is read; the largest published ones have 40 MB."""

MAX_ADDED_CHARACTERS = 256
"""The longest added token that has a meaning; published ones have 40 characters."""

MAX_SHOWN = 200
"""Characters of a value that a message quotes."""

SHORT_CHARACTERS = 4096
"""Texts of up to this length together are encoded on the calling thread. Other threads would need milliseconds to begin
while kernels occupy every core, and the encoding itself takes a tenth of that. Not if the tokenizer has a regular
expression that may take long (`expressions`)."""


class TokenizerError(ValueError):
    """A folder whose tokenizer cannot be used, or text that cannot be tokenized."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist.

    Raises:
        TokenizerError: the file cannot be read or holds no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = read_json_file(path)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


class Tokenizer:
    """A model's tokenizer and its special tokens.

    Nothing changes after construction, so one instance serves all threads (the library releases the GIL while it
    encodes).

    Args:
        backend: the tokenizer of the library; its settings are changed (no truncation, no padding).
        special_tokens: the special tokens' strings by role: ``bos_token``, ``eos_token``, ``pad_token`` …
        eos_token_ids: further ids that end an answer, in addition to that of ``eos_token``.
        add_bos_token: put the bos token first if the backend's own post-processor does not.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        add_bos_token: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        # A named special token may be a plain word to the backend; make it special without new vocabulary.
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        named = (text for text in self.special_tokens.values() if text not in added)
        known = [text for text in named if backend.token_to_id(text) is not None]
        backend.add_special_tokens(known)
        self.backend = backend
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.pad_token = self.special_tokens.get("pad_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self.pad_token_id = self._id_of(self.pad_token)
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: frozenset[int] = frozenset((*eos, *eos_token_ids))
        self.special_token_ids: frozenset[int] = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self.added = AddedTokens.of(backend)
        """The tokens that text must not become by its spelling alone."""
        _check_added(self.added)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._highest = max(vocabulary.values(), default=-1)
        self._longest = _longest_token(backend, vocabulary)
        first = backend.encode("").ids[:1]
        self._may_take_long = may_take_long(backend)
        self._prefix = (
            [self.bos_token_id]
            if add_bos_token and self.bos_token_id is not None and first != [self.bos_token_id]
            else []
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load from a folder in Hugging Face layout.

        Reads ``tokenizer.json``, the files beside it that name tokens (see `named_tokens`), and the ids that end an
        answer from ``generation_config.json`` (then ``config.json``). A folder with only an older format
        (``vocab.json`` and ``merges.txt``, ``tokenizer.model``) is converted by transformers.

        Raises:
            TokenizerError: the folder contains no tokenizer, or it cannot be read.
        """
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder)
        older = [read_json(folder / name) for name in ("special_tokens_map.json", "added_tokens.json")]
        try:
            special_tokens = add_named_tokens(backend, config, *older)
        except BadTokens as error:
            raise TokenizerError(f"{folder / 'tokenizer_config.json'}: {error}") from error
        eos = _eos_token_ids(folder / "generation_config.json")
        if eos is None:
            eos = _eos_token_ids(folder / "config.json")
        return cls(backend, special_tokens, eos or (), config.get("add_bos_token") is True)

    def is_short(self, characters: int) -> bool:
        """Whether texts of so many characters together are encoded at once on the calling thread."""
        return characters <= SHORT_CHARACTERS and not self._may_take_long

    def fewest(self, text: str) -> int:
        """A number of tokens that ``text`` has at least, without encoding it; 0 if no such number is known.

        Reading and freeing millions of tokens holds the interpreter's lock for some tenths of a second.
        """
        return 0 if not self._longest else -(-len(text) // self._longest)

    def why_unreadable(self, tokens: Sequence[int], vocab_size: int) -> str | None:
        """Why a model of ``vocab_size`` ids cannot read ``tokens`` of a text; None if it can.

        Some checkpoints have tokens in the tokenizer for which the model has no embedding.
        """
        if self._highest < vocab_size:
            return None
        wrong = next((token for token in tokens if token >= vocab_size), None)
        if wrong is None:
            return None
        return (
            f"the tokenizer gives {self.token(wrong)!r:.80} the token id {wrong}, which the model does not have "
            f"(its ids are 0 to {vocab_size - 1}); remove this text from the request"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of ``text``.

        ``add_special_tokens`` adds what the model expects around plain text, most often a bos token in front. A
        rendered chat template contains its own and must be encoded without.

        Raises:
            TokenizerError: ``text`` contains a lone surrogate, which no encoding of Unicode can represent.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of each text, as in `encode`; long texts are encoded in parallel, on other threads."""
        with _refusals():
            if self.is_short(sum(map(len, texts))):
                encodings = [
                    self.backend.encode(text, add_special_tokens=add_special_tokens) for text in texts
                ]
            else:
                encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        prefix = self._prefix if add_special_tokens else []
        return [prefix + encoding.ids for encoding in encodings]

    def encode_prompt(self, prompt: PromptText, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a rendered prompt; what it quotes becomes no control token.

        Raises:
            TokenizerError: as in `encode`.
        """
        if not prompt.quoted:
            return self.encode(prompt.text, add_special_tokens)
        prefix = self._prefix if add_special_tokens else []
        with _refusals():
            return prefix + self._quoting.encode(prompt, add_special_tokens)

    @cached_property
    def _quoting(self) -> QuotingEncoder:
        return QuotingEncoder(self.backend, self.added)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``; ids outside the vocabulary add nothing."""
        return self.backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def ended_by(self, ids: Collection[int]) -> Tokenizer:
        """The same tokenizer with further ids that end an answer."""
        other = copy(self)
        other.eos_token_ids = self.eos_token_ids | frozenset(ids)
        return other

    def token(self, token: int) -> str | None:
        """The string of a token in the vocabulary (``Ġthe``, ``▁the``, ``<0x0A>``); None if it has none."""
        return self.backend.id_to_token(token)

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises `TokenizerError` where the library cannot encode a text."""
    try:
        yield
    except (TypeError, UnicodeError) as error:
        raise TokenizerError("text must be valid Unicode (it contains a lone surrogate)") from error
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise TokenizerError(f"the tokenizer cannot split this text: {str(error)[:200]}") from error


def _is_panic(error: BaseException) -> bool:
    """Whether the library gave up, as a regular expression of a tokenizer can: this error is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _check_added(added: AddedTokens) -> None:
    """Refuse added tokens whose spellings cannot be looked for: all their beginnings are, in every prompt."""
    longest = max((*added.special, *added.marks), key=len, default="")
    if len(longest) > MAX_ADDED_CHARACTERS:
        raise TokenizerError(
            f"the added token {longest[:40]!r}… has {len(longest)} characters, and the limit is"
            f" {MAX_ADDED_CHARACTERS}"
        )


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            check_size(path, MAX_TOKENIZER_BYTES)
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from error
    older = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
    if not older:
        raise TokenizerError(f"{folder} contains no tokenizer: expected tokenizer.json")
    return _convert(folder, older[0])


def _convert(folder: Path, older: str) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{folder} contains {older} but no tokenizer.json; converting it needs transformers: "
            "pip install 'headrace[bench]'"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:  # transformers and its dependencies raise many types
        why = str(error).strip().partition("\n")[0]
        raise TokenizerError(f"{folder / older} cannot be converted to a tokenizer.json: {why}") from error
    return tokenizers.Tokenizer.from_str(backend.to_str())


def _eos_token_ids(path: Path) -> list[int] | None:
    """The ids of tokens that end an output (one or a list), if a config names them."""
    value = read_json(path).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise TokenizerError(
            f"{path}: eos_token_id must be a token id or a list of token ids, got {repr(value)[:MAX_SHOWN]}"
        )
    return ids


_KEEPING = {"Sequence", "Split", "Regex", "String", "ByteLevel", "Digits"}
"""Steps before BPE that keep every character of a text."""


def _longest_token(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int:
    """The most characters that one token can stand for; 0 if that is not known.

    It is known for byte-level BPE, where every byte has a token. A normalizer, a token for unknown words, an added
    token that takes spaces with it, or a cut that drops spaces could stand for any number.
    """
    added = backend.get_added_tokens_decoder().values()
    cuts = str(backend.pre_tokenizer)
    if (
        "Removed" in cuts
        or not set(re.findall(r"(\w+)\(", cuts)) <= _KEEPING
        or not isinstance(backend.model, tokenizers.models.BPE)
        or not isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        or backend.normalizer is not None
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return 0
    if not vocabulary.keys() >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        return 0
    return max(map(len, vocabulary))


# Caches the tokens of long prompt parts, so that a system prompt is not tokenized again for every request.
#
#  <|system|>…two pages…<|end|>
# <|user|>…a question…<|end|>
# <|assistant|>
#  └─ cached ─────────────────┘└─ to be tokenized ──────────────────────┘
# Tokenizers find special tokens first and then process the text between two of them separately. So a text may be cut
# before any special token, and its parts tokenized separately. If a special token also absorbs adjacent white space,
# nothing is cut. Parts are cached per scope, so tokenizing time reveals nothing about prompts of other scopes.

KEPT_CHARACTERS = 4 << 20
"""Maximum characters of all cached parts; with their tokens they take about 10 MB."""

SHORTEST = 256
"""Shorter parts are not cached, because tokenizing them is fast."""

LONGEST = KEPT_CHARACTERS // 4
"""Longer parts are not cached: one would evict most others, and copying its tokens would hold up the event loop."""


class Part(NamedTuple):
    """A part of a text. ``tokens`` is None if they are not cached; a part with ``kept`` will be cached."""

    text: str
    kept: bool
    tokens: array[int] | None


class Segments:
    """The cached parts of one tokenizer. For one thread; the tokenizing itself may run on another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder().values()
        # Tokens that are searched for in the raw text, before anything else.
        found_first = [token for token in added if not token.normalized]
        marks = sorted((re.escape(token.content) for token in found_first), key=len, reverse=True)
        greedy = any(token.lstrip or token.rstrip or token.single_word for token in found_first)
        self._mark = re.compile("|".join(marks)) if marks and not greedy else None
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._characters = 0

    def cut(self, text: str, scope: str) -> list[Part]:
        """The parts of ``text``, with short ones merged; the whole text if it may not be cut."""
        starts = [] if self._mark is None else [match.start() for match in self._mark.finditer(text)]
        if not starts:
            return [Part(text, kept=False, tokens=None)]
        parts: list[Part] = []
        begun = 0
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            if SHORTEST <= end - start <= LONGEST:
                if begun < start:
                    parts.append(Part(text[begun:start], kept=False, tokens=None))
                part = text[start:end]
                parts.append(Part(part, kept=True, tokens=self._known.get((scope, part))))
                begun = end
        if begun < len(text):
            parts.append(Part(text[begun:], kept=False, tokens=None))
        return parts

    def join(self, parts: Sequence[Part], tokenized: Iterable[list[int]], scope: str) -> list[int]:
        """The tokens of all ``parts``; ``tokenized`` are those of the parts that were not cached, in order."""
        rest = iter(tokenized)
        tokens: list[int] = []
        for part in parts:
            found = next(rest) if part.tokens is None else part.tokens.tolist()
            tokens += found
            if part.kept:
                self._keep((scope, part.text), array("i", found) if part.tokens is None else part.tokens)
        return tokens

    def _keep(self, name: tuple[str, str], tokens: array[int]) -> None:
        if name not in self._known:
            self._characters += len(name[1])
        self._known[name] = tokens
        self._known.move_to_end(name)
        while self._characters > KEPT_CHARACTERS:
            (_, text), _ = self._known.popitem(last=False)
            self._characters -= len(text)


MAX_PARTS = 64
"""Normalizers and pre-tokenizers of a tokenizer, each of which reads the whole text."""


def may_take_long(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer's regular expressions, with which it splits text, may take long for a short text.

    Published tokenizers have expressions of which each position of a text is tried in a few ways, or in a few times as
    many as the text has characters. What `expressions` does not understand may take long.
    """
    parts = [
        json.loads(part.__getstate__())
        for part in (backend.normalizer, backend.pre_tokenizer)
        if part is not None
    ]
    found = [ways(each) for each in _values(parts, "Regex")]
    if any(each is None or each.fallible > 1 for each in found):
        return True
    many = sum(each.choices for each in found if each is not None) > MAX_WAYS
    return many or sum(1 for _ in _values(parts, "type")) > MAX_PARTS


def _values(value: Any, wanted: str) -> Iterator[str]:
    """The values of this key in all objects."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == wanted:
                yield str(each)
            else:
                yield from _values(each, wanted)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, wanted)
