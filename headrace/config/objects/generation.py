"""The value of ``--override-generation-config``: a JSON object with the fields of a ``generation_config.json``."""

from __future__ import annotations

import json
from typing import Any

from headrace.config.errors import ConfigError, suggestion
from headrace.config.objects.readers import json_object

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The fields of a ``generation_config.json`` that become defaults of requests, as in vLLM."""

EXAMPLE = '{"temperature": 0.6, "top_k": 20}'


def generation_overrides_text(label: str, value: Any) -> Any:
    """The value of the option as JSON text, with known fields only; None stays None.

    The range of a value is checked together with those of the model's file.

    Raises:
        ConfigError: it is no JSON object, or a field is unknown.
    """
    if value is None:
        return None
    given = json_object(label, value, EXAMPLE)
    for field in given:
        if field not in FIELDS:
            raise ConfigError(
                f"{label}: there is no field {field!r}{suggestion(field, FIELDS)}; known: {', '.join(FIELDS)}"
            )
    return json.dumps(given, sort_keys=True)
