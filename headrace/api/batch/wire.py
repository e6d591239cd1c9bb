"""Bodies, objects and errors of the endpoints for files and batches, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field

from headrace.api.batch.records import BatchRecord, BatchStatus, FileRecord
from headrace.api.batch.store import NotFound
from headrace.api.compile.fields import MetadataField
from headrace.api.errors import ApiError
from headrace.api.wire import Wire

MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 30 * 86_400


class ExpiresAfter(Wire):
    """When files are deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(
        ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS, description="Lifetime after the anchor."
    )


class UploadForm(Wire):
    """The form of ``POST /v1/files``, for the API description; `batch.upload` parses it."""

    file: str = Field(
        json_schema_extra={"format": "binary"}, description="Requests, one JSON object per line."
    )
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = Field(
        None, description="Sent as expires_after[anchor] and expires_after[seconds]; default: 30 days."
    )


class BatchBody(Wire):
    """The body of ``POST /v1/batches``."""

    input_file_id: str = Field(max_length=128, description="Id of an uploaded file with the purpose batch.")
    endpoint: str = Field(max_length=128, description="Endpoint that all lines of the file use.")
    completion_window: str = Field(
        max_length=16,
        description="Time until the batch expires: 24h, or other minutes, hours or days (30m, 7d).",
    )
    metadata: MetadataField = Field(None, description="Stored with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="Lifetime of the output and the error file; default: until they are deleted."
    )


class CancelBody(Wire):
    """The body of ``POST /v1/batches/{id}/cancel``: it has no fields."""


def file_object(file: FileRecord) -> dict[str, Any]:
    """A file as JSON."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.nbytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRecord, model: str) -> dict[str, Any]:
    """A batch as JSON."""
    totals, times = batch.totals, batch.times
    shown: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": model,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id if batch.has_output else None,
        "error_file_id": batch.error_file_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "in_progress_at": times.get(BatchStatus.IN_PROGRESS),
        "expires_at": batch.expires_at,
    }
    for status in ("finalizing", "completed", "failed", "expired", "cancelling", "cancelled"):
        shown[f"{status}_at"] = times.get(status)
    shown["request_counts"] = {
        "total": batch.total,
        "completed": totals.completed,
        "failed": totals.failed,
    }
    shown["usage"] = {
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
    }
    shown["metadata"] = batch.metadata
    return shown


def list_object(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page; ``data`` has one object more than ``limit`` if others follow."""
    page = data[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(data) > limit,
    }


def not_found(kind: str, id: str, param: str) -> ApiError:
    """404: the tenant has no file or batch with this id; another tenant may have it."""
    return ApiError(404, f"No such {kind}: {id!r}.", param=param, code=f"{kind}_not_found")


@contextmanager
def found(kind: str, id: str, param: str) -> Iterator[None]:
    """Turn `NotFound` from the store into a 404 that names ``param``."""
    try:
        yield
    except NotFound:
        raise not_found(kind, id, param) from None


def file_too_large(limit: int) -> ApiError:
    """413: the file is larger than the server accepts."""
    return ApiError(413, f"The file is larger than {limit} bytes.", param="file", code="file_too_large")


def storage_quota_exceeded(why: str) -> ApiError:
    """403: the tenant stores as much as it may."""
    return ApiError(403, f"The file cannot be stored: {why}.", param="file", code="storage_quota_exceeded")


def batch_quota_exceeded(why: str) -> ApiError:
    """429: the tenant has as many unfinished batches as it may have."""
    return ApiError(
        429,
        f"The batch cannot be created: {why}.",
        type="rate_limit_error",
        code="batch_quota_exceeded",
        retry_after=60,
    )


def insufficient_storage() -> ApiError:
    """507: the server's disk is full or failed."""
    return ApiError(
        507, "The server has no room to store the file.", type="server_error", code="insufficient_storage"
    )
