"""Names of fields in errors: a dialect is served as a chat request, and its errors name the client's own fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headrace.core.request import InvalidParameter
from headrace.serve.http.errors import ApiError, invalid


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors: ``names`` has the client's by those of the chat body."""
    try:
        yield
    except InvalidParameter as error:
        raise _renamed(invalid(str(error), error.param), names) from None
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    first = re.split(r"[.\[]", error.param or "")[0]
    if first not in names:
        return error
    name = re.compile("|".join(rf"\b{each}\b" for each in names))
    return ApiError(
        error.status,
        name.sub(lambda found: names[found[0]], str(error)),
        type=error.type,
        param=names[first],
        code=error.code,
        headers=error.headers,
    )
