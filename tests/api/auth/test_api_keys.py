import pytest

from headrace.api.auth.api_keys import Grant, Keys, read_keys, tenant
from headrace.api.auth.roles import Role


def test_without_keys_nothing_is_required():
    keys = Keys({})
    assert not keys.required
    assert keys.identify("Bearer anything") is None


def test_each_of_several_keys_is_accepted_and_has_its_own_id():
    keys = Keys({"alpha": Grant(), "beta": Grant()})
    names = {keys.identify("Bearer alpha").name, keys.identify("bearer  beta").name}
    assert keys.required
    assert len(names) == 2


def test_an_id_shows_nothing_of_its_key():
    identity = Keys({"sk-secret": Grant()}).identify("Bearer sk-secret")
    assert identity.name.startswith("key-")
    assert not identity.named
    assert "secret" not in str(identity)


@pytest.mark.parametrize(
    "header", [None, "", "alpha", "Basic alpha", "Bearer", "Bearer alph", "Bearer alphaa", "Bearer \udcff"]
)
def test_any_other_header_is_not_accepted(header):
    assert Keys({"alpha": Grant()}).identify(header) is None


def test_keys_are_replaced_all_at_once():
    keys = Keys({"old": Grant()})
    keys.replace({"new": Grant("acme", Role.ADMIN)})
    assert keys.identify("Bearer old") is None
    assert keys.identify("Bearer new") == ("acme", Role.ADMIN, True)
    assert keys.count() == {Role.ADMIN: 1}


def test_a_key_file_has_one_key_per_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# staff\nalpha\n\n  beta  \n")
    assert read_keys(["gamma"], str(file)) == dict.fromkeys(("gamma", "alpha", "beta"), Grant())


def test_lines_may_name_a_tenant_and_a_role(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alpha acme\nbeta\tacme inference\ngamma - admin\ndelta - metrics\nepsilon acme admin\n")
    assert read_keys([], str(file)) == {
        "alpha": Grant("acme"),
        "beta": Grant("acme"),
        "gamma": Grant(None, Role.ADMIN),
        "delta": Grant(None, Role.METRICS),
        "epsilon": Grant("acme", Role.ADMIN),
    }
    keys = Keys(read_keys([], str(file)))
    assert keys.identify("Bearer alpha").name == keys.identify("Bearer beta").name == "acme"
    assert keys.identify("Bearer acme") is None


def test_options_give_keys_their_roles():
    keys = read_keys(["a"], None, admin_keys=["b"], metrics_keys=["c"])
    assert [keys[key].role for key in "abc"] == [Role.INFERENCE, Role.ADMIN, Role.METRICS]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alpha acme admin more", "expected KEY"),
        ("alpha clé", "printable ASCII"),
        ("alpha " + "x" * 129, "1 to 128"),
        ("alpha acme corp", "role must be one of inference, metrics, admin"),
        ("alphé", "printable ASCII"),
    ],
)
def test_a_wrong_line_is_refused_without_showing_its_key(tmp_path, line, problem):
    file = tmp_path / "keys"
    file.write_text(f"good\n{line}")
    with pytest.raises(ValueError, match=problem) as error:
        read_keys([], str(file))
    assert "alph" not in str(error.value)


def test_a_wrong_line_is_named_by_its_number(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# staff\n\nalpha acme corp\n")
    with pytest.raises(ValueError, match="line 3"):
        read_keys([], str(file))


@pytest.mark.parametrize(("keys", "text"), [([""], None), (["  "], None), ([], "# nothing\n")])
def test_empty_keys_are_refused_instead_of_opening_the_server(tmp_path, keys, text):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="api-key"):
        read_keys(keys, str(file) if text is not None else None)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere cannot be read: No such file"):
        read_keys([], str(tmp_path / "nowhere"))


def test_a_key_has_one_role():
    with pytest.raises(ValueError, match="two roles, inference and admin") as error:
        read_keys(["alpha"], None, admin_keys=["alpha"])
    assert "alpha" not in str(error.value)


def test_metrics_keys_alone_would_leave_no_way_to_send_requests():
    with pytest.raises(ValueError, match="only metrics keys"):
        read_keys([], None, metrics_keys=["m"])


def test_the_tenant_is_the_key_then_the_header_then_the_user():
    assert tenant("key-1", "acme", "ann") == "key-1"
    assert tenant(None, "acme", "ann") == "acme"
    assert tenant(None, None, "ann") == "ann"
    assert tenant(None, None, None) == "default"


@pytest.mark.parametrize("key", ["clé", "two\nlines", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ValueError, match="printable ASCII"):
        read_keys([key], None)
