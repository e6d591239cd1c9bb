"""Tokens that files beside ``tokenizer.json`` name, and control tokens that end an answer although no file names them.

Named tokens are added to the tokenizer in the order and with the flags that transformers gives them. Newer folders name
all of them in ``tokenizer_config.json``, under ``added_tokens_decoder``. In folders without that field,
``special_tokens_map.json`` and ``added_tokens.json`` count too. `tokenizer` reads the files.

A model's files name its end tokens. Fine-tuned chat models often name only that of their base model, and write
another one behind each answer. Without it an answer would go on with turns that the model invents. `turn_ends` knows
such tokens by their spelling in published models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Fields = Mapping[str, Any]


class BadTokens(ValueError):
    """A field that names tokens has another form; the message names the field, but not its file."""


def add_named_tokens(
    backend: Tokenizer, config: Fields, older_map: Fields, older_added: Fields
) -> dict[str, str]:
    """Add the tokens that the files name, and return the strings of the special tokens by their roles.

    Args:
        backend: the tokenizer that gets the tokens.
        config: ``tokenizer_config.json``.
        older_map: ``special_tokens_map.json``.
        older_added: ``added_tokens.json``.

    Raises:
        BadTokens: a field has another form.
    """
    present = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    named = _named(config, {} if listed is not None else older_map)
    by_id = _by_id(listed) if listed is not None else _older(older_added, named.strings) | present
    flags = {token.content: token for _, token in sorted(by_id.items(), key=lambda each: each[0] in present)}
    roles = named.roles
    roles |= {role: flags.get(roles[role].content, roles[role]) for role in _ROLES if role in roles}
    added = [by_id[number] for number in sorted(by_id)]
    names = {token.content for token in (*present.values(), *added)}
    for token in (*roles.values(), *named.others):
        if token.content not in names and token not in added:
            added.append(token)
    with_role = {token.content for token in roles.values()}
    for token in added:
        token.special = token.special or token.content in with_role
    backend.add_tokens(added)
    strings = {role: token.content for role, token in roles.items()}
    return strings if listed is None else _known_roles(backend, older_map) | strings


class _Named(NamedTuple):
    """The special tokens by role, others without one, and the strings that make an older added token special."""

    roles: dict[str, AddedToken]
    others: list[AddedToken]
    strings: set[str | None]


def _named(config: Fields, older_map: Fields) -> _Named:
    """The special tokens that the config and the older map name; the map counts more, except for roles that only this
    model has.
    """
    fields = dict(config)
    if not fields.get(_EXTRA) and _OLDER_EXTRA in fields:
        fields[_EXTRA] = fields.pop(_OLDER_EXTRA)
    own = {name: fields.pop(name) for name in list(fields) if _is_own_role(name, fields[name], (str,))}
    own |= _extra_roles(fields)
    for name, value in older_map.items():
        if name == _EXTRA and isinstance(value, list):
            before = _list(_EXTRA, fields.get(_EXTRA))
            value = [*before, *(each for each in value if each not in before)]
        fields[name] = value
    own |= _extra_roles(fields)
    values = [*(fields.get(role) for role in _ROLES), *_list(_EXTRA, fields.get(_EXTRA))]
    strings = {_text(value) for value in values if not _is_typed(value)}
    extra = _EXTRA if _EXTRA in fields else _OLDER_EXTRA
    own = {name: value for name, value in fields.items() if _is_own_role(name, value, (str, Mapping))} | own
    roles = {role: _token(role, fields[role]) for role in _ROLES if fields.get(role) is not None}
    roles |= {name: _token(name, value) for name, value in own.items()}
    return _Named(roles, [_token(extra, value) for value in _list(extra, fields.get(extra))], strings)


def _is_own_role(name: str, value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a field gives a token a role that only this model has, such as ``image_token``."""
    return name.endswith("_token") and name not in _ROLES and isinstance(value, kinds)


def _extra_roles(fields: dict[str, Any]) -> Fields:
    """Take the extra tokens out of the fields if they have roles."""
    roles: Fields = fields.pop(_EXTRA) if isinstance(fields.get(_EXTRA), Mapping) else {}
    return roles


def _by_id(listed: Any) -> dict[int, AddedToken]:
    if not isinstance(listed, Mapping):
        raise BadTokens(
            f"added_tokens_decoder must be an object of tokens by their ids, got {_shown(listed)}"
        )
    tokens = {}
    for number, value in listed.items():
        if not (number.isascii() and number.isdecimal() and len(number) < 12 and isinstance(value, Mapping)):
            raise BadTokens(
                "added_tokens_decoder must be an object of tokens by their ids, got"
                f" {_shown(number)}: {_shown(value)}"
            )
        tokens[int(number)] = _token("added_tokens_decoder", {"__type": None, **value})
    return tokens


def _older(added: Fields, special: Collection[str | None]) -> dict[int, AddedToken]:
    """The tokens of ``added_tokens.json``."""
    tokens = {}
    for text, number in added.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 32:
            raise BadTokens(f"added_tokens.json must map tokens to ids, got {_shown(text)}: {_shown(number)}")
        _check_unicode("added_tokens.json", text)
        tokens[number] = AddedToken(text, normalized=text not in special, special=text in special)
    return tokens


def _known_roles(backend: Tokenizer, older_map: Fields) -> dict[str, str]:
    """The roles that only an older map names, of tokens that are special without it."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    texts = {role: _text(value) for role, value in older_map.items() if role.endswith("_token")}
    return {role: text for role, text in texts.items() if text is not None and text in special}


def _is_typed(value: Any) -> bool:
    """Whether a token was written as an object of transformers' class, with all its flags."""
    return isinstance(value, Mapping) and "__type" in value


def _list(field: str, value: Any) -> Sequence[Any]:
    if value is None or isinstance(value, Mapping):
        return ()
    if not isinstance(value, list):
        raise BadTokens(
            f"{field} must be a list of tokens or an object of tokens by role, got {_shown(value)}"
        )
    return value


def _text(value: Any) -> str | None:
    """The string of a token, which may stand alone or in an object of its flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _token(field: str, value: Any) -> AddedToken:
    """A token from its string, which is special, or from an object with ``content`` and flags.

    An object of transformers' class is special only if it says so.
    """
    text = _text(value)
    if text is None:
        raise BadTokens(f"{field} must be a token or an object with content, got {_shown(value)}")
    _check_unicode(field, text)
    given = value if isinstance(value, Mapping) else {}
    flags = {name: given[name] for name in _FLAGS if name in given}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise BadTokens(f"{field}: the flags of a token must be true or false, got {_shown(value)}")
    return AddedToken(text, **({"special": not _is_typed(value)} | flags))


def _check_unicode(field: str, text: str) -> None:
    """Raise BadTokens if ``text`` has a lone surrogate, which JSON can spell."""
    if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        raise BadTokens(f"{field} must be valid Unicode, got {_shown(text)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_ENDS = frozenset(
    {
        "</s>",
        "<end_of_turn>",
        "<seed:eos>",
        "<turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|assistant_end|>",
        "<|call|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eom|>",
        "<|eot_id|>",
        "<|eot|>",
        "<|im_end|>",
        "<|return|>",
        "<|role_end|>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "[e~[",
        "[|endofturn|]",
    }
)
"""Not beginnings of turns, with which GLM ends an answer: its files name them."""


_OF_MESSAGES = (("<|return|>", "<|call|>"), ("<|begin|>", "<|content|>"))
"""Tokens of gpt-oss and of Solar Open, in which ``<|end|>`` ends a message, after which the answer goes on."""


def turn_ends(control: Mapping[str, int]) -> list[int]:
    """The ids of those ``control`` tokens, text and id, that end an answer wherever they are."""
    return sorted(_ends_of(control).values())


def shown_ends(control: Mapping[str, int], templates: Iterable[str]) -> list[int]:
    """As `turn_ends`, of the tokens that a chat template writes."""
    text = "\n".join(templates)
    return sorted(id for token, id in _ends_of(control).items() if token in text)


def _ends_of(control: Mapping[str, int]) -> dict[str, int]:
    known = {text: id for text, id in control.items() if text in _ENDS}
    if any(control.keys() >= set(each) for each in _OF_MESSAGES):
        known.pop("<|end|>", None)
    return known
