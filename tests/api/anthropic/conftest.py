import pytest

from tests.api.caching import RequestsNoted


@pytest.fixture
def options(request):
    """What a test changes about its house; its road to the engine notes the requests."""
    return {"lookup": RequestsNoted} | getattr(request, "param", {})
