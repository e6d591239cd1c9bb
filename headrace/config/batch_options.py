"""Options of files and batches on the server: their folder, and the limits of each tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from headrace.config.quantities import BYTES


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The folder of `/v1/files` and `/v1/batches`, and the limits of each tenant."""

    batch_path: Annotated[
        str | None,
        Field(
            description="Folder for the files and batches of /v1/files and /v1/batches (default: none, both are off)."
        ),
    ] = None
    batch_file_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum size of an uploaded file; larger ones get status 413.",
            json_schema_extra=BYTES,
        ),
    ] = 200 << 20
    batch_tenant_bytes: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum total size of one tenant's files; further uploads get status 403.",
            json_schema_extra=BYTES,
        ),
    ] = 4 << 30
    batch_tenant_files: Annotated[
        int, Field(ge=1, description="Maximum number of one tenant's files; further uploads get status 403.")
    ] = 1000
    batch_max_lines: Annotated[int, Field(ge=1, description="Maximum number of requests in one batch.")] = (
        50_000
    )
    batch_tenant_batches: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum number of one tenant's unfinished batches; further ones get status 429.",
        ),
    ] = 16
    batch_concurrency: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="Maximum number of running requests of all batches together, in each service class.",
        ),
    ] = 16
