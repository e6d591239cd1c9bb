"""Values as bytes, for messages between a server and the process of its engine.

```
 value ── `codec_of` its type hint ──> plain tuples ── `marshal` ──> bytes ── a length of 4 bytes before them ──> socket
```
`marshal` is the fastest encoder of Python's library. Its format belongs to one version of Python and is not safe to
read from strangers: both processes run the same program, and their socket has no address.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter, itemgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.core.events import Emitted, Event
from headrace.core.plan import new_tuple

Plain = Any
"""None, numbers, strings, bytes, and tuples, lists, dictionaries and frozen sets of them."""

MARSHAL_VERSION = 2
"""The last version that writes no references between equal objects, which take longer to find than to repeat."""

_LENGTH = struct.Struct("<I")
_AS_THEY_ARE = (int, float, bool, bytes, NoneType, Any)
_WHOLE = itemgetter(slice(None))


class Codec(NamedTuple):
    """Turns values of one type into plain ones and back; None: they are plain."""

    pack: Callable[[Any], Plain] | None = None
    unpack: Callable[[Plain], Any] | None = None


PLAIN = Codec()


@cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type hint: of plain values, enumerations, paths, named tuples, data classes, and collections.

    Raises:
        TypeError: there is none for this type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint in _AS_THEY_ARE or origin is Literal:
        return PLAIN
    if hint is str:
        return Codec(str)  # an enumeration's text, too
    if origin in (Union, UnionType):
        return _union(args)
    if origin is frozenset:
        return PLAIN
    if origin is tuple:
        return (
            _every(args[0], tuple)
            if args[1:] == (...,)
            else _fields([codec_of(each) for each in args], tuple)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(codec_of(args[0]), codec_of(args[1]))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _every(args[0], list)
    return _class(hint)


def _class(kind: Any) -> Codec:
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return Codec(attrgetter("value"), kind)
        if issubclass(kind, Path):
            return Codec(str, Path)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            hints = get_type_hints(kind)
            return _fields([codec_of(hints[name]) for name in kind._fields], partial(new_tuple, kind))
        if is_dataclass(kind):
            hints, names = get_type_hints(kind), [each.name for each in fields(kind)]
            packed = _fields(
                [codec_of(hints[name]) for name in names],
                lambda values: kind(**dict(zip(names, values, strict=True))),
            )
            read = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
            pack = packed.pack
            assert pack is not None
            return Codec(lambda value: pack(read(value)), packed.unpack)
    raise TypeError(f"a message has no form for {kind}")


def _fields(codecs: Sequence[Codec], make: Callable[[Plain], Any]) -> Codec:
    """The codec of a tuple whose fields have these codecs."""
    packs = [(at, each.pack) for at, each in enumerate(codecs) if each.pack is not None]
    unpacks = [(at, each.unpack) for at, each in enumerate(codecs) if each.unpack is not None]

    def pack(value: Sequence[Any]) -> Plain:
        values = list(value)
        for at, each in packs:
            values[at] = each(values[at])
        return tuple(values)

    def unpack(plain: Plain) -> Any:
        values = list(plain)
        for at, each in unpacks:
            values[at] = each(values[at])
        return make(values)

    return Codec(pack if packs else _WHOLE, unpack if unpacks else make)


def _every(hint: Any, kind: type) -> Codec:
    """The codec of a collection. Texts in it are passed as they are: they are identifiers and names."""
    if hint is str:
        return Codec(kind)
    pack, unpack = codec_of(hint)
    return Codec(
        kind if pack is None else lambda values: kind([pack(each) for each in values]),
        None if unpack is None else lambda plain: kind([unpack(each) for each in plain]),
    )


def _mapping(keys: Codec, values: Codec) -> Codec:
    name, pack = (each or _same for each in (keys.pack, values.pack))
    named, unpack = (each or _same for each in (keys.unpack, values.unpack))
    packs = keys.pack is not None or values.pack is not None
    unpacks = keys.unpack is not None or values.unpack is not None
    return Codec(
        (lambda given: {name(key): pack(each) for key, each in given.items()}) if packs else dict,
        (lambda plain: {named(key): unpack(each) for key, each in plain.items()}) if unpacks else None,
    )


def _same(value: Any) -> Any:
    return value


def _union(hints: Sequence[Any]) -> Codec:
    """The codec of a value or None, or of one of several classes, whose number comes first."""
    some = [each for each in hints if each is not NoneType]
    codecs = [codec_of(each) for each in some]
    if all(each == PLAIN for each in codecs):
        return PLAIN
    if len(some) == 1:
        pack, unpack = codecs[0]
        return Codec(
            pack and (lambda value: None if value is None else pack(value)),
            unpack and (lambda plain: None if plain is None else unpack(plain)),
        )
    if not all(isinstance(each, type) for each in some):
        raise TypeError(f"a message has no form for one of {some}")
    numbers = {
        kind: (number, codec.pack) for number, (kind, codec) in enumerate(zip(some, codecs, strict=True))
    }
    back = [each.unpack for each in codecs]

    def pack_one(value: Any) -> Plain:
        number, pack = numbers[type(value)]
        return number, value if pack is None else pack(value)

    def unpack_one(plain: Plain) -> Any:
        unpack = back[plain[0]]
        return plain[1] if unpack is None else unpack(plain[1])

    return Codec(pack_one, unpack_one)


ValueT = TypeVar("ValueT")


def packed(hint: Any, value: Any) -> Plain:
    """A value of this type as a plain one."""
    pack = codec_of(hint).pack
    return value if pack is None else pack(value)


def unpacked(hint: type[ValueT], plain: Plain) -> ValueT:
    """The value of this type."""
    kind: Any = hint
    unpack = codec_of(kind).unpack
    value: ValueT = plain if unpack is None else unpack(plain)
    return value


_TOKENS = -1
"""The number of an `Emitted` without log-probabilities. There is one for each token, so its form is the shortest."""


def pack_events(events: Sequence[Event]) -> Plain:
    """The events of a step."""
    pack = codec_of(Event).pack
    assert pack is not None
    return [
        (_TOKENS, event[0], event[1]) if type(event) is Emitted and not event[2] else pack(event)
        for event in events
    ]


def unpack_events(plain: Plain) -> list[Event]:
    """The events of a step."""
    unpack = codec_of(Event).unpack
    assert unpack is not None
    return [
        new_tuple(Emitted, (each[1], each[2], ())) if each[0] == _TOKENS else unpack(each) for each in plain
    ]


def frame(message: Plain) -> bytes:
    """A message, with its length before it."""
    body = marshal.dumps(message, MARSHAL_VERSION)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts received bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Plain]:
        """The messages that are complete with these bytes, in order."""
        self._bytes += received
        messages, begin = [], 0
        while len(self._bytes) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, begin)
            end = begin + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            with memoryview(self._bytes)[begin + _LENGTH.size : end] as body:
                messages.append(marshal.loads(body))
            begin = end
        del self._bytes[:begin]
        return messages
