from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import ConfigError
from headrace.core.request import Slo
from headrace.core.tenancy.kv_limits import NO_KV_BOUNDS, kv_bounds
from headrace.core.tenancy.tenants import CLASSES, EQUALS, PRIORITY, ClassShare, TenantLimits
from headrace.wiring.tenants import check_kv_bounds, check_moves, describe_tenants, read_tenants

FULL = """
default:
  requests_per_minute: 60
tenants:
  acme:
    weight: 4
    default_class: priority
    classes: [priority, flex]
    tokens_per_minute: 100000
    tokens_per_day: 20000000
    max_concurrent_requests: 32
    models: {large: {tokens_per_minute: 20000}}
classes:
  priority: {floor: 0.2, ttft_seconds: 0.5}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "tenants.yaml"
    path.write_text(text)
    return str(path)


def test_without_a_file_everybody_is_alike() -> None:
    assert read_tenants(None) == (EQUALS, CLASSES)


def test_a_class_may_move_up_to_bounds(tmp_path: Path) -> None:
    text = "classes: {priority: {max_weight: 32, ttft_seconds: 1}, flex: {max_floor: 0.3, tpot_seconds: 0.1}}"
    classes = {each.name: each for each in read_tenants(write(tmp_path, text))[1]}
    assert classes["priority"].most == ClassShare(32.0, PRIORITY.floor)
    assert classes["flex"].most == ClassShare(1.0, 0.3)
    assert classes["default"].most is None
    lines = describe_tenants(EQUALS, tuple(classes.values()))
    assert "up to weight 32 and floor 10% while it misses its targets" in lines[0]
    moving = tuple(classes.values())
    check_moves(moving, "fair", recorded=False)
    check_moves(CLASSES, "fcfs", recorded=True)
    with pytest.raises(ConfigError, match="max_weight and max_floor need --scheduling-policy fair"):
        check_moves(moving, "fcfs", recorded=False)
    with pytest.raises(ConfigError, match="a trace cannot be recorded with them"):
        check_moves(moving, "fair", recorded=True)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read_tenants(write(tmp_path, "")) == (EQUALS, CLASSES)


def test_a_file_names_terms_and_classes(tmp_path: Path) -> None:
    tenants, classes = read_tenants(write(tmp_path, FULL))
    acme = tenants.terms("acme")
    assert (acme.weight, acme.default_class, acme.classes) == (4.0, "priority", {"priority", "flex"})
    assert acme.limits == TenantLimits(None, 100_000, 20_000_000, 32)
    assert acme.limits_of("large") == TenantLimits(tokens_per_minute=20_000)
    assert tenants.terms("else").limits == TenantLimits(requests_per_minute=60)
    priority = next(each for each in classes if each.name == "priority")
    assert (priority.floor, priority.weight) == (0.2, PRIORITY.weight)
    assert priority.slo == Slo(0.5, PRIORITY.slo.tpot_seconds)
    assert [each.name for each in classes] == [each.name for each in CLASSES]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("classes: {priority: {max_weight: 9}}", r"classes\.priority: .* set ttft_seconds or tpot_seconds"),
        (
            "classes: {priority: {max_weight: 2, ttft_seconds: 1}}",
            r"max_weight: expected at least the weight, 8",
        ),
        (
            "classes: {priority: {max_floor: 0.05, ttft_seconds: 1}}",
            r"max_floor: expected at least the floor, 0.1",
        ),
        (
            "classes: {priority: {max_floor: 0.9, ttft_seconds: 1}}",
            r"max_floor where set, must add up to at most 1",
        ),
        ("tenants: {acme: {weight: -1}}", r"tenants\.acme\.weight: .*at least 1e-06"),
        ("default: {weight: 1.0e-320}", r"default\.weight: .*at least 1e-06"),
        (
            "classes: {flex: {weight: 1.0e-310}}",
            r"classes\.flex\.weight: .*at least 1e-06",
        ),
        ("classes: {flex: {ttft_seconds: 0}}", r"classes\.flex\.ttft_seconds: .*above 0"),
        ("tenants: {acme: {weight: heavy}}", r"tenants\.acme\.weight: .*number"),
        ("tenants: {acme: {tokens_per_minutes: 5}}", r"tenants\.acme\.tokens_per_minutes: there is no such"),
        ("tenants: {acme: {default_class: gold}}", r"default_class: expected one of priority, default, flex"),
        ("tenants: {acme: {classes: [background]}}", r"classes\.0: expected one of"),
        (
            "tenants: {acme: {models: {m: {weight: 1}}}}",
            r"tenants\.acme\.models\.m\.weight: there is no such",
        ),
        ("default: {requests_per_minute: 0}", r"default\.requests_per_minute: .*at least 1"),
        ("default: {requests_per_minute: 1.5}", r"default\.requests_per_minute"),
        ("classes: {gold: {weight: 1}}", r"classes\.gold: expected one of"),
        ("tenants: {acme: {max_kv_tokens: 0}}", r"tenants\.acme\.max_kv_tokens: .*at least 1"),
        ("default: {max_kv_share: 1.5}", r"default\.max_kv_share: .*at most 1"),
        ("classes: {flex: {max_kv_share: 0}}", r"classes\.flex\.max_kv_share: .*above 0"),
        ("tenants: {acme: {max_kv_token: 5}}", r"acme\.max_kv_token: there is no such.*max_kv_tokens"),
        ("tenants: {acme: {models: {m: {max_kv_tokens: 5}}}}", r"models\.m\.max_kv_tokens: there is no such"),
        ("classes: {flex: {floor: 2}}", r"classes\.flex\.floor"),
        ("classes: {flex: {floor: 0.6}, default: {floor: 0.5}}", r"floors must add up to at most 1"),
        ("weights: {}", r"weights: there is no such field"),
        ("[1]", "must hold one mapping"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tenants(file)
    assert file in str(caught.value)


def test_floors_that_are_all_of_it_are_not_more_than_that(tmp_path: Path) -> None:
    floors = "classes: {priority: {floor: 0.33}, default: {floor: 0.56}, flex: {floor: 0.11}}"
    assert [each.floor for each in read_tenants(write(tmp_path, floors))[1]] == [0.33, 0.56, 0.11, 0.0]


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--tenants nowhere\.yaml cannot be read"):
        read_tenants("nowhere.yaml")


def test_the_table_names_everybody_and_every_bound(tmp_path: Path) -> None:
    shown = "\n".join(describe_tenants(*read_tenants(write(tmp_path, FULL))))
    for words in (
        "class        priority: weight 8, floor 20%, TTFT 0.5 s, 512 prompt tokens a step",
        "tenant       acme: weight 4, class priority, may use flex priority, 100,000 tokens per minute",
        "32 concurrent requests, large: 20,000 tokens per minute",
        "tenant       (others): weight 1, class default, 60 requests per minute",
    ):
        assert words in shown
    assert "background" not in shown


def test_a_tenant_may_have_its_own_markers(tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n  a: {normalize: [billing_header]}\n  b: {normalize: []}\n  c: {}\n")
    tenants, classes = read_tenants(str(file))
    assert [tenants.terms(name).normalize for name in "abc"] == [{"billing_header"}, set(), None]
    assert "tenant       a: weight 1, class default, normalizes billing_header" in describe_tenants(
        tenants, classes
    )
    file.write_text("tenants:\n  a: {normalize: [dates]}\n")
    with pytest.raises(
        ConfigError, match=r"tenants\.a\.normalize.*'dates' is not a marker; expected one of all"
    ):
        read_tenants(str(file))


KV = "tenants: {acme: {max_kv_tokens: 4000, max_kv_share: 0.5}}\nclasses: {flex: {max_kv_share: 0.25}}\n"


def test_bounds_on_kv_memory_are_read_and_shown(tmp_path: Path) -> None:
    tenants, classes = read_tenants(write(tmp_path, KV))
    bounds = kv_bounds(tenants, classes, 10_000)
    assert (bounds.of_tenant("acme"), bounds.of_tenant("b"), bounds.classes["flex"]) == (4000, None, 2500)
    shown = "\n".join(describe_tenants(tenants, classes))
    assert "class default, 4,000 KV tokens, 50% of the KV cache" in shown
    assert "gathers 0.5 s, 25% of the KV cache" in shown


def test_bounds_on_kv_memory_that_nothing_keeps_are_refused(tmp_path: Path) -> None:
    bounds = kv_bounds(*read_tenants(write(tmp_path, KV)), 10_000)
    check_kv_bounds(bounds, "fair", recorded=False)
    check_kv_bounds(NO_KV_BOUNDS, "fcfs", recorded=True)
    with pytest.raises(
        ConfigError, match="max_kv_tokens and max_kv_share need --scheduling-policy fair; fcfs"
    ):
        check_kv_bounds(bounds, "fcfs", recorded=False)
    with pytest.raises(ConfigError, match="a trace cannot be recorded with them"):
        check_kv_bounds(bounds, "fair", recorded=True)
