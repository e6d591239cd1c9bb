import pytest

PATH = "/v1/completions"


@pytest.mark.parametrize("options", [{"max_body_bytes": 100}])
def test_a_body_may_be_as_long_as_the_limit_and_no_longer(house):
    raw = b'{"prompt": "x", "max_tokens": 1}'
    assert house.client.post(PATH, content=raw + b" " * (100 - len(raw))).status_code == 200
    refused = house.client.post(PATH, content=raw + b" " * (101 - len(raw)))
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("options", [{"max_body_bytes": 100}])
def test_a_body_of_undeclared_length_is_counted(house):
    assert house.client.post(PATH, content=iter([b" " * 60, b" " * 60])).status_code == 413
