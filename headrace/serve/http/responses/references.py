"""Items that a request names by their ids instead of sending them.

The id of an output item has the id of its response in it, so an item is found without an index of items.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.serve.http.errors import ApiError
from headrace.serve.http.responses.input_wire import Item, ItemReference
from headrace.serve.http.responses.items import RESPONSE_PREFIX, Stored, stored_items
from headrace.serve.http.responses.store import ResponseStore


async def input_items(store: ResponseStore, tenant: str | None, given: str | Sequence[Item]) -> list[Stored]:
    """The input of a request, each item with an id, and stored items in place of references.

    Raises:
        ApiError: an item is not stored, or belongs to another tenant.
    """
    if isinstance(given, str):
        return stored_items(given)
    items: list[Stored] = []
    for at, item in enumerate(given):
        if isinstance(item, ItemReference):
            items.append(await _referred(store, tenant, item.id, at))
        else:
            items += stored_items([item])
    return items


async def _referred(store: ResponseStore, tenant: str | None, id: str, at: int) -> Stored:
    response = id.partition("_")[2].rpartition("_")[0]
    record = await store.get(tenant, RESPONSE_PREFIX + response) if response else None
    for item in record.response["output"] if record is not None else ():
        if item["id"] == id:
            found: Stored = item
            return found
    message = f"There is no output item {id!r} of a stored response."
    raise ApiError(404, message, param=f"input[{at}].id", code="item_not_found")
