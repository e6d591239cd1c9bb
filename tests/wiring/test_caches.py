from types import SimpleNamespace

import pytest

from headrace.config import ConfigError, ResponseCacheOptions, SemanticOptions, options
from headrace.response_cache.opening import open_caches
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.opening import describe_caches, open_stores
from headrace.text.template import ChatTemplate
from headrace.wiring.caches import cache_parts, engine_identity
from tests.text.vocabularies import byte_level


@pytest.fixture
def loaded(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    return SimpleNamespace(
        name="fox",
        folder=tmp_path,
        tokenizer=byte_level(),
        template=ChatTemplate({"default": "{{ messages }}"}),
        facts=SimpleNamespace(kind="cpu", isa="AVX2"),
        dtype="float32",
        quantization="",
        kernels="cpp",
        kv_dtype="bfloat16",
        isa="avx2",
        ledger=SimpleNamespace(max_model_len=64),
        dummy=False,
        seed=0,
        controls=SimpleNamespace(proposes_cached=False, outputs=None),
    )


def make(loaded, *stores, **more):
    service = SimpleNamespace(note=lambda event: None, now=lambda: 0.0)
    given = options({"response_cache": stores, **more})
    return open_caches(given.response_cache, SemanticOptions(), service, cache_parts(loaded, given))


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        (["disk"], "expected one of memory, "),
        (["memory:5"], "expected memory"),
        (["sqlite:"], "expected memory"),
        (["http://localhost"], "expected memory"),
        (["no_such_module:Store:pass@word"], "there is no module 'no_such_module'"),
        (["memory", "memory"], "two stores of the same kind"),
        (["redis://localhost:1/0"], "--response-cache-secret is needed"),
        (["memcached://localhost"], "--response-cache-secret is needed"),
        (["sqlite:/dev/null/answers"], "sqlite:/dev/null/answers"),
    ],
)
def test_a_store_that_cannot_be_had_is_said_so_that_it_can_be_mended(loaded, stores, message):
    with pytest.raises(ConfigError, match=message):
        make(loaded, *stores)


REDIS = r"expected redis://HOST:PORT/DB"
DATABASE = "expected one database number"
MEMCACHED = r"expected memcached://HOST:PORT"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("redis:host:6379", REDIS),
        ("redis:/host:6379/0", REDIS),
        ("redis:user:hunter2@host:6379", REDIS),
        ("redis://", REDIS),
        ("redis:///0", REDIS),
        ("redis://:6379/0", REDIS),
        ("redis://two words/0", f"{REDIS}: there is no host 'two words'"),
        ("redis://host:0/0", "a port from 1 to 65535"),
        ("redis://host:/0", "a port from 1 to 65535"),
        ("redis://host:99999", "range 0-65535"),
        ("redis://host:6379:1", "Port could not be cast|expected"),
        ("redis://::1:6379", "Port could not be cast|expected|nonnumeric"),
        ("redis://[::g]:6379", "'::g'|IPv6"),
        ("redis://:hunter2#hash@host/0", "in a password as %23"),
        ("redis://host/zero", DATABASE),
        ("redis://host/0/1", DATABASE),
        ("redis://host/-1", DATABASE),
        ("redis://host/1?db=2", DATABASE),
        ("redis://host?timeuot=1", r"\?timeuot=1: not an option"),
        ("redis://host?socket_timeout=soon", "socket_timeout"),
        ("rediss:host", REDIS),
        ("unix:/run/redis.sock", "expected unix:///PATH"),
        ("unix://run/redis.sock", "expected unix:///PATH"),
        ("unix://", "expected unix:///PATH"),
        ("memcached:host:11211", MEMCACHED),
        ("memcached:/host", MEMCACHED),
        ("memcached://", MEMCACHED),
        ("memcached://host/0", f"{MEMCACHED} and nothing else"),
        ("memcached://user:hunter2@host", f"{MEMCACHED} and nothing else"),
        ("memcached://host?timeout=1", f"{MEMCACHED} and nothing else"),
        ("memcached://localhost:x", "memcached://localhost:x"),
        ("sqlite://responses.db", "expected memory, "),
        ("sqlite:///responses.db", "expected memory, "),
    ],
)
def test_a_mistyped_address_is_refused_and_names_no_other_server(loaded, address, message):
    with pytest.raises(ConfigError, match=message) as error:
        make(loaded, address, response_cache_secret="s")
    assert str(error.value).startswith("--response-cache ")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "redis://host",
        "redis://host/",
        "redis://host:6380/3",
        "redis://user:a%23b@host:6379/0?socket_timeout=1",
        "rediss://[::1]:6379/0",
        "unix:///run/redis.sock?db=1",
        "unix://user:word@/run/redis.sock",
        "memcached://host",
        "memcached://[::1]:11212/",
    ],
)
def test_addresses_of_every_form_are_taken(loaded, address):
    assert make(loaded, address, response_cache_secret="s").sizes() != {}


def test_a_client_library_that_is_missing_is_named(loaded, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "headrace.response_cache.stores.redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[redis\]'"):
        make(loaded, "redis://localhost:1/0", response_cache_secret="s")


def test_nothing_is_kept_unless_asked_for(loaded):
    assert make(loaded).sizes() == {}
    assert make(loaded, "memory").sizes() != {}


def test_what_changes_an_answer_changes_the_fingerprint(loaded):
    def changed(**fields):
        return engine_identity(SimpleNamespace(**(vars(loaded) | fields)), True).fingerprint()

    before = changed()
    assert changed() == before
    others = [
        changed(name="dog"),
        changed(template=ChatTemplate({"default": "{{ messages[0] }}"})),
        changed(template=ChatTemplate({"default": "{{ messages }}"}, {"bos_token": "<s>"})),
        changed(facts=SimpleNamespace(kind="cpu", isa="AVX512")),
        changed(dtype="bfloat16"),
        changed(kernels="torch"),
        changed(kv_dtype="int8"),
        changed(isa="avx512"),
        changed(ledger=SimpleNamespace(max_model_len=65)),
        changed(dummy=True),
        changed(dummy=True, seed=1),
        engine_identity(loaded, True, "secret").fingerprint(),
    ]
    (loaded.folder / "model.safetensors").write_bytes(b"Weights")
    others.append(changed())
    assert len({before, *others}) == 14


def test_a_revision_of_the_hub_stands_for_its_weights(loaded, tmp_path):
    def at(commit):
        folder = tmp_path / "models--fox" / "snapshots" / commit
        return engine_identity(SimpleNamespace(**(vars(loaded) | {"folder": folder})), True)

    assert at("aaa") == at("aaa") != at("bbb")


def test_no_password_is_shown(loaded):
    secret = "redis://me:pass@host:1/0"
    (line,) = describe_caches(ResponseCacheOptions(response_cache=("memory", secret)))
    assert line.endswith("in memory, redis://host:1/0")
    with pytest.raises(ConfigError) as error:
        make(loaded, "redos://me:pass@host:1/0")
    assert "pass@" not in str(error.value)


class PluggedIn(MemoryStore):
    name = "plugged-in"

    def __init__(self, address, max_bytes):
        super().__init__(max_bytes)
        self.address = address


def test_a_store_of_another_package_gets_its_address_and_needs_a_secret(loaded):
    spec = f"{__name__}:PluggedIn:s3://bucket/answers"
    with pytest.raises(ConfigError, match="--response-cache-secret is needed"):
        make(loaded, spec)
    given = options({"response_cache": (spec,), "response_cache_secret": "s"})
    parts = cache_parts(loaded, given)
    (tier,) = open_stores(given.response_cache, lambda event: None, parts.plugged_in)
    assert (tier.name, tier._store.address) == ("plugged-in", "s3://bucket/answers")
    assert not tier.at_hand
