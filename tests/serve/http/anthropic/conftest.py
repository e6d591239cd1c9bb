import pytest

from tests.serve.http.cache.test_cache_marks import Spy


@pytest.fixture
def options(request):
    """What a test changes about its house; its road to the engine notes the requests."""
    return {"recall": Spy} | getattr(request, "param", {})
