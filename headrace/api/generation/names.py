"""Names of fields in errors: a dialect is served as a chat request, and its errors name the client's own fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from headrace.api.errors import ApiError, invalid
from headrace.core.request import InvalidParameter


@contextmanager
def named(names: Mapping[str, str], places: Callable[[str], str] = str) -> Iterator[None]:
    """Rename fields in errors: ``names`` has the client's by those of the chat body.

    ``places`` does the same for paths within a text, where a field has another place in the client's body.
    """
    try:
        yield
    except InvalidParameter as error:
        raise _renamed(invalid(str(error), error.param), names, places) from None
    except ApiError as error:
        raise _renamed(error, names, places) from None


def _renamed(error: ApiError, names: Mapping[str, str], places: Callable[[str], str]) -> ApiError:
    param, message = error.param or "", str(error)
    first = re.split(r"[.\[]", param)[0]
    if first in names:
        name = re.compile("|".join(rf"\b{each}\b" for each in names))
        own, message = names[first], name.sub(lambda found: names[found[0]], message)
    elif (own := places(param)) != param:
        message = places(message)
    else:
        return error
    return ApiError(
        error.status,
        message,
        type=error.type,
        param=own,
        code=error.code,
        headers=error.headers,
    )
