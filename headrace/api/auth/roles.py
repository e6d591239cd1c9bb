"""The roles of API keys, and the one table that says which access each route needs.

`api.auth.access` checks every request against `ROUTES`. The application refuses to start with a route that is not in
the table, so a new route cannot be open by mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """The role of an API key."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class Access(StrEnum):
    """The access that a route needs, once API keys are configured."""

    PUBLIC = "public"  # no key
    ANY_KEY = "any key"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


ALLOWED: Mapping[Access, frozenset[Role]] = {
    Access.PUBLIC: frozenset(Role),
    Access.ANY_KEY: frozenset(Role),
    Access.INFERENCE: frozenset({Role.INFERENCE, Role.ADMIN}),
    Access.METRICS: frozenset({Role.METRICS, Role.ADMIN}),
    Access.ADMIN: frozenset({Role.ADMIN}),
}
"""Which roles each access admits. An admin key may use every route."""

ROUTES: Mapping[str, Access] = {
    # Health and documentation: no data of tenants.
    "GET /health": Access.PUBLIC,
    "GET /health/ready": Access.PUBLIC,
    "GET /healthz": Access.PUBLIC,
    "GET /livez": Access.PUBLIC,
    "GET /readyz": Access.PUBLIC,
    "GET /ping": Access.PUBLIC,
    "POST /ping": Access.PUBLIC,
    "GET /version": Access.PUBLIC,
    "GET /docs": Access.PUBLIC,
    "GET /openapi.json": Access.PUBLIC,
    # Pages without data: they ask for a key and read everything with it.
    "GET /": Access.PUBLIC,
    "GET /chat": Access.PUBLIC,
    "GET /dashboard": Access.PUBLIC,
    "GET /dashboard/{file}": Access.PUBLIC,
    # State of the whole server, without tenants' names.
    "GET /server_info": Access.ANY_KEY,
    # Simulations of random requests, limited in size and number.
    "POST /v1/simulations": Access.ANY_KEY,
    "GET /v1/tour": Access.ANY_KEY,
    # An inference key sees only its own tenant, a metrics key no single requests.
    "GET /v1/dashboard/stream": Access.ANY_KEY,
    # Metrics carry tenants' names as labels.
    "GET /metrics": Access.METRICS,
    # Inference. Each route shows and changes only what belongs to the key's tenant; an admin key reaches all tenants.
    "POST /v1/chat/completions": Access.INFERENCE,
    "POST /v1/completions": Access.INFERENCE,
    "POST /v1/responses": Access.INFERENCE,
    "POST /v1/responses/compact": Access.INFERENCE,
    "POST /v1/responses/input_tokens": Access.INFERENCE,
    "GET /v1/responses/{id}": Access.INFERENCE,
    "DELETE /v1/responses/{id}": Access.INFERENCE,
    "POST /v1/responses/{id}/cancel": Access.INFERENCE,
    "GET /v1/responses/{id}/input_items": Access.INFERENCE,
    "POST /v1/messages": Access.INFERENCE,
    "POST /v1/messages/count_tokens": Access.INFERENCE,
    "POST /v1/embeddings": Access.INFERENCE,
    "POST /v1/rerank": Access.INFERENCE,
    "POST /rerank": Access.INFERENCE,
    "POST /v2/rerank": Access.INFERENCE,
    "POST /v1/score": Access.INFERENCE,
    "POST /score": Access.INFERENCE,
    "POST /tokenize": Access.INFERENCE,
    "POST /detokenize": Access.INFERENCE,
    "GET /v1/models": Access.INFERENCE,
    "GET /v1/models/{model:path}": Access.INFERENCE,
    "GET /v1/requests/{id}": Access.INFERENCE,
    "GET /v1/requests/{id}/timeline": Access.INFERENCE,
    "GET /v1/usage": Access.INFERENCE,
    "DELETE /v1/sessions/{id}": Access.INFERENCE,
    "POST /abort_request": Access.INFERENCE,
    "GET /v1/cache/stats": Access.INFERENCE,
    "POST /v1/cache/clear": Access.INFERENCE,
    "POST /v1/cache/feedback": Access.INFERENCE,
    "GET /v1/cache/warm": Access.INFERENCE,
    "POST /v1/cache/warm": Access.INFERENCE,
    "POST /v1/files": Access.INFERENCE,
    "GET /v1/files": Access.INFERENCE,
    "GET /v1/files/{id}": Access.INFERENCE,
    "DELETE /v1/files/{id}": Access.INFERENCE,
    "GET /v1/files/{id}/content": Access.INFERENCE,
    "POST /v1/batches": Access.INFERENCE,
    "GET /v1/batches": Access.INFERENCE,
    "GET /v1/batches/{id}": Access.INFERENCE,
    "POST /v1/batches/{id}/cancel": Access.INFERENCE,
    # Administration: affects or shows every tenant.
    "GET /v1/steps": Access.ADMIN,
    "POST /reset_prefix_cache": Access.ADMIN,
    "POST /pause": Access.ADMIN,
    "POST /resume": Access.ADMIN,
    "POST /v1/experiments": Access.ADMIN,
    "POST /v1/experiments/dry-run": Access.ADMIN,
    "GET /v1/tuner": Access.ADMIN,
    "POST /v1/tuner": Access.ADMIN,
    "GET /v1/experiments": Access.ADMIN,
    "GET /v1/experiments/{id}": Access.ADMIN,
    "DELETE /v1/experiments/{id}": Access.ADMIN,
}
"""The access that each method and path needs. Paths are spelled as in the application's route table."""

METRICS_PORT = frozenset(
    {
        *("GET /health", "GET /health/ready", "GET /healthz", "GET /livez", "GET /readyz"),
        *("GET /ping", "GET /version", "GET /metrics"),
    }
)
"""The routes that ``--metrics-port`` serves."""
