import pytest

from headrace.serve.auth.api_keys import Keys, read_keys, tenant


def test_without_keys_nothing_is_required():
    keys = Keys({})
    assert not keys.required
    assert keys.key_id("Bearer anything") is None


def test_each_of_several_keys_opens_and_has_its_own_id():
    keys = Keys({"alpha": None, "beta": None})
    ids = {keys.key_id("Bearer alpha"), keys.key_id("bearer  beta")}
    assert keys.required
    assert None not in ids
    assert len(ids) == 2


def test_an_id_shows_nothing_of_its_key():
    key_id = Keys({"sk-secret": None}).key_id("Bearer sk-secret")
    assert key_id is not None
    assert key_id.startswith("key-")
    assert "secret" not in key_id


@pytest.mark.parametrize(
    "header", [None, "", "alpha", "Basic alpha", "Bearer", "Bearer alph", "Bearer alphaa", "Bearer \udcff"]
)
def test_anything_else_opens_nothing(header):
    assert Keys({"alpha": None}).key_id(header) is None


def test_a_key_file_has_one_key_a_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# staff\nalpha\n\n  beta  \n")
    assert read_keys(["gamma"], str(file)) == {"gamma": None, "alpha": None, "beta": None}


def test_keys_of_a_file_may_name_their_tenant(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alpha acme\nbeta\tacme\ngamma\n")
    keys = Keys(read_keys([], str(file)))
    assert keys.key_id("Bearer alpha") == keys.key_id("Bearer beta") == "acme"
    assert keys.key_id("Bearer gamma").startswith("key-")
    assert keys.key_id("Bearer acme") is None


@pytest.mark.parametrize("line", ["alpha acme corp", "alpha clé", "alpha " + "x" * 129])
def test_a_line_that_is_not_understood_is_refused_without_showing_its_key(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(ValueError, match="at most one tenant") as error:
        read_keys([], str(file))
    assert "alpha" not in str(error.value)


@pytest.mark.parametrize(("keys", "text"), [([""], None), (["  "], None), ([], "# nobody\n")])
def test_empty_keys_are_refused_instead_of_opening_the_server(tmp_path, keys, text):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="api-key"):
        read_keys(keys, str(file) if text is not None else None)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        read_keys([], str(tmp_path / "nowhere"))


def test_the_tenant_is_the_key_then_the_header_then_the_user():
    assert tenant("key-1", "acme", "ann") == "key-1"
    assert tenant(None, "acme", "ann") == "acme"
    assert tenant(None, None, "ann") == "ann"
    assert tenant(None, None, None) == "default"


@pytest.mark.parametrize("key", ["clé", "two\nlines", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ValueError, match="printable ASCII"):
        read_keys([key], None)
