"""The file of ``--tenants``: weights, limits and latency targets of tenants and service classes.

```yaml
default:                        # each tenant that is not named below
  requests_per_minute: 60
tenants:
  acme:
    weight: 4
    default_class: priority
    classes: [priority, flex]
    tokens_per_minute: 100000
    tokens_per_day: 20000000
    max_concurrent_requests: 32
    max_kv_tokens: 40000
    models: {large: {tokens_per_minute: 20000}}
    normalize: [billing_header, current_date]
classes:
  priority: {weight: 8, floor: 0.1, ttft_seconds: 1.0, tpot_seconds: 0.1, prompt_tokens: 512, max_weight: 32}
  flex: {max_kv_share: 0.5}
```
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from headrace.api.auth.api_keys import KeyFile, read_keys
from headrace.api.compile.markers import known_marker
from headrace.config import ConfigError, ServerOptions, read_mapping
from headrace.config.errors import suggestion
from headrace.config.values import plain_reason
from headrace.core.request import NO_SLO, Slo
from headrace.core.tenancy.kv_limits import KvBounds
from headrace.core.tenancy.tenants import (
    CLASSES,
    EQUALS,
    ClassShare,
    KvBound,
    ServiceClass,
    TenantLimits,
    Tenants,
    TenantTerms,
)

NAMES = tuple(each.name for each in CLASSES if each.weight)
"""Classes that a tenant may use."""

Positive = Annotated[float, Field(gt=0, le=1e6)]
Weight = Annotated[float, Field(ge=1e-6, le=1e6)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=f"^({'|'.join(NAMES)})$")]
MarkerName = Annotated[str, AfterValidator(known_marker)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Kv(_Form):
    max_kv_tokens: Count | None = None
    max_kv_share: Annotated[float, Field(gt=0, le=1)] | None = None

    def kv(self) -> KvBound:
        return KvBound(self.max_kv_tokens, self.max_kv_share)


class _Limits(_Form):
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    max_concurrent_requests: Count | None = None

    def limits(self) -> TenantLimits:
        return TenantLimits(
            self.requests_per_minute,
            self.tokens_per_minute,
            self.tokens_per_day,
            self.max_concurrent_requests,
        )


class _Tenant(_Limits, _Kv):
    weight: Weight = 1.0
    default_class: Name = "default"
    classes: Annotated[list[Name], Field(min_length=1)] | None = None
    models: dict[str, _Limits] = {}
    normalize: list[MarkerName] | None = None

    def terms(self) -> TenantTerms:
        return TenantTerms(
            weight=self.weight,
            default_class=self.default_class,
            classes=frozenset(self.classes or ()),
            limits=self.limits(),
            models={model: limits.limits() for model, limits in self.models.items()},
            normalize=None if self.normalize is None else frozenset(self.normalize),
            kv=self.kv(),
        )


class _Class(_Kv):
    weight: Weight | None = None
    floor: Annotated[float, Field(ge=0, le=1)] | None = None
    ttft_seconds: Positive | None = None
    tpot_seconds: Positive | None = None
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    gather_seconds: Annotated[float, Field(ge=0, le=60)] | None = None
    max_weight: Weight | None = None
    max_floor: Annotated[float, Field(ge=0, le=1)] | None = None

    def over(self, given: ServiceClass) -> ServiceClass:
        """``given`` with the fields that the file sets."""
        bounds = {"max_kv_tokens", "max_kv_share", "max_weight", "max_floor"}
        values = self.model_dump(exclude_none=True, exclude=bounds)
        ttft, tpot = given.slo
        slo = Slo(values.pop("ttft_seconds", ttft), values.pop("tpot_seconds", tpot))
        changed = replace(given, slo=slo, kv=self.kv(), **values)
        if self.max_weight is None and self.max_floor is None:
            return changed
        most = ClassShare(
            changed.weight if self.max_weight is None else self.max_weight,
            changed.floor if self.max_floor is None else self.max_floor,
        )
        return replace(changed, most=most)


class _File(_Form):
    default: _Tenant = _Tenant()
    tenants: dict[str, _Tenant] = {}
    classes: dict[Name, _Class] = {}


FIELDS = {name for form in (_File, _Tenant, _Class) for name in form.model_fields}
"""All fields of the file, for suggestions."""


def read_tenants(file: str | None) -> tuple[Tenants, tuple[ServiceClass, ...]]:
    """The tenants and classes of a file; without one, all tenants are equal and the classes are the built-in ones.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or out of range; the message names the field.
    """
    if file is None:
        return EQUALS, CLASSES
    content = read_mapping(Path(file), f"--tenants {file}")
    try:
        parsed = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the file"
        raise ConfigError(f"--tenants {file}: {place}: {_why(error, first)}") from None
    classes = tuple(parsed.classes.get(each.name, _Class()).over(each) for each in CLASSES)
    if math.fsum(each.floor for each in classes) > 1.0:
        raise ConfigError(f"--tenants {file}: classes: the floors must add up to at most 1")
    _check_moves(file, classes)
    named = {name: each.terms() for name, each in parsed.tenants.items()}
    return Tenants(named, parsed.default.terms()), classes


def _check_moves(file: str, classes: tuple[ServiceClass, ...]) -> None:
    """Refuse bounds of weights and floors that cannot be kept or would never be used."""
    for each in classes:
        if each.most is None:
            continue
        place = f"--tenants {file}: classes.{each.name}"
        if each.most.weight < each.weight:
            raise ConfigError(f"{place}.max_weight: expected at least the weight, {each.weight:g}")
        if each.most.floor < each.floor:
            raise ConfigError(f"{place}.max_floor: expected at least the floor, {each.floor:g}")
        if each.slo == NO_SLO:
            raise ConfigError(
                f"{place}: max_weight and max_floor are used when targets are missed; set ttft_seconds or tpot_seconds"
            )
    if math.fsum(each.floor if each.most is None else each.most.floor for each in classes) > 1.0:
        raise ConfigError(
            f"--tenants {file}: classes: floors, or max_floor where set, must add up to at most 1"
        )


def check_moves(classes: tuple[ServiceClass, ...], policy: str, *, recorded: bool) -> None:
    """Refuse weights that move where nothing moves them.

    Raises:
        ConfigError: the scheduling policy knows no classes, or the engine is recorded.
    """
    if all(each.most is None for each in classes):
        return
    if policy != "fair":
        raise ConfigError(
            f"--tenants: max_weight and max_floor need --scheduling-policy fair; {policy} knows no classes"
        )
    if recorded:  # a replay could not repeat the changes
        raise ConfigError("--tenants: max_weight and max_floor: a trace cannot be recorded with them")


def describe_tenants(tenants: Tenants, classes: tuple[ServiceClass, ...]) -> list[str]:
    """The classes, and the tenants' terms if there are any, as lines for the terminal."""
    lines = [f"class        {_class_line(each)}" for each in classes if each.weight]
    if tenants != EQUALS:
        every = [*tenants.named.items(), ("(others)", tenants.default)]
        lines += [f"tenant       {name}: {_terms_line(terms)}" for name, terms in every]
    return lines


def _class_line(each: ServiceClass) -> str:
    facts = [f"weight {each.weight:g}", f"floor {each.floor:.0%}"]
    if each.most is not None:
        facts.append(
            f"up to weight {each.most.weight:g} and floor {each.most.floor:.0%} while it misses its targets"
        )
    if each.slo.ttft_seconds is not None:
        facts.append(f"TTFT {each.slo.ttft_seconds:g} s")
    if each.slo.tpot_seconds is not None:
        facts.append(f"TPOT {each.slo.tpot_seconds:g} s")
    if each.prompt_tokens:
        facts.append(f"{each.prompt_tokens} prompt tokens a step")
    if each.gather_seconds:
        facts.append(f"gathers {each.gather_seconds:g} s")
    facts += _kv_facts(each.kv)
    return f"{each.name}: {', '.join(facts)}"


def _terms_line(terms: TenantTerms) -> str:
    facts = [f"weight {terms.weight:g}", f"class {terms.default_class}"]
    if terms.classes:
        facts.append(f"may use {' '.join(sorted(terms.classes))}")
    if terms.normalize is not None:
        facts.append(f"normalizes {' '.join(sorted(terms.normalize)) or 'nothing'}")
    facts += _kv_facts(terms.kv)
    facts += _limit_facts("", terms.limits)
    for model, limits in terms.models.items():
        facts += _limit_facts(f"{model}: ", limits)
    return ", ".join(facts)


def _kv_facts(bound: KvBound) -> list[str]:
    tokens = [] if bound.tokens is None else [f"{bound.tokens:,} KV tokens"]
    return tokens + ([] if bound.share is None else [f"{bound.share:.0%} of the KV cache"])


def check_kv_bounds(bounds: KvBounds, policy: str, *, recorded: bool) -> None:
    """Refuse bounds on KV memory where nothing keeps them.

    Raises:
        ConfigError: the scheduling policy knows no tenants, or the engine is recorded.
    """
    if bounds.any and policy != "fair":
        raise ConfigError(
            f"--tenants: max_kv_tokens and max_kv_share need --scheduling-policy fair; {policy} knows no tenants"
        )
    if bounds.any and recorded:
        raise ConfigError("--tenants: max_kv_tokens and max_kv_share: a trace cannot be recorded with them")


def _limit_facts(of: str, limits: TenantLimits) -> list[str]:
    values = limits._asdict().items()
    return [f"{of}{value:,} {name.replace('_', ' ')}" for name, value in values if value is not None]


def _why(error: ValidationError, first: ErrorDetails) -> str:
    """The first error as text, with a suggestion for a field that does not exist."""
    if first["type"] == "string_pattern_mismatch":
        return f"expected one of {', '.join(NAMES)}, got {first['input']!r:.200}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return plain_reason(error) + suggestion(str(first["loc"][-1]), FIELDS)
    return plain_reason(error)


def open_keys(options: ServerOptions) -> KeyFile:
    """The API keys of a server, from its options and its key file.

    Raises:
        ConfigError: they cannot be used.
    """
    read = partial(
        read_keys,
        options.api_key,
        options.api_key_file,
        admin_keys=options.admin_key,
        metrics_keys=options.metrics_key,
    )
    try:
        return KeyFile(read, options.api_key_file)
    except ValueError as error:
        raise ConfigError(str(error)) from error
