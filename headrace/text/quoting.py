"""Tokenizes prompts in which some text spells a control token and is text nevertheless.

A second tokenizer shares the model's vocabulary and merges. It knows each control token under a secret spelling only,
and the prompt's own control tokens are spelled so. Everything else is encoded in one run, as the model would encode it
if there were no control tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import tokenizers

from headrace.text.content import AddedTokens, PromptText, spelling_pattern

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
