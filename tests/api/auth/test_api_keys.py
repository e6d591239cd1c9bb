import asyncio
import logging
import os

import pytest

from headrace.api.auth.api_keys import Grant, KeyFile, Keys, Role, read_keys, tenant


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


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys"
    file.write_text("first\n")
    return file


@pytest.fixture
def key_file(path):
    return KeyFile(lambda: read_keys([], str(path)), str(path), poll_seconds=0.01)


def accepted(key_file, key):
    return key_file.keys.identify(f"Bearer {key}") is not None


def test_a_changed_file_is_read_once_it_stays_the_same(path, key_file):
    key_file.watch.check()
    path.write_text("second\nthird\n")
    key_file.watch.check()
    assert accepted(key_file, "first")  # it may still be being written
    key_file.watch.check()
    assert accepted(key_file, "second")
    assert not accepted(key_file, "first")


def test_a_file_that_takes_the_old_ones_place_is_noticed(path, key_file, tmp_path):
    new = tmp_path / "new"
    new.write_text("other\n")
    os.utime(new, ns=(0, path.stat().st_mtime_ns))
    new.replace(path)  # same size and time, another inode
    key_file.watch.check()
    key_file.watch.check()
    assert accepted(key_file, "other")


@pytest.mark.parametrize("broken", ["", "secret acme nonsense\n", None])
def test_a_broken_file_keeps_the_old_keys_and_warns_once(path, key_file, caplog, broken):
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(4):
        key_file.watch.check()
    assert accepted(key_file, "first")
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "previous keys stay valid" in record.getMessage()
    assert "secret" not in caplog.text


def test_the_log_says_how_many_keys_there_are_and_never_which(path, key_file, caplog):
    path.write_text("sk-one\nsk-two acme\nsk-three - admin\n")
    with caplog.at_level(logging.INFO):
        assert key_file.reload()
    assert "2 inference, 0 metrics, 1 admin" in caplog.text
    assert "sk-" not in caplog.text


def test_the_file_is_watched_while_the_server_runs(path, key_file):
    async def rotate():
        key_file.watch.start()
        path.write_text("second\n")
        until = asyncio.get_running_loop().time() + 60
        while not accepted(key_file, "second"):
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.01)
        await key_file.watch.stop()

    asyncio.run(rotate())


def test_without_a_file_there_is_nothing_to_watch():
    async def idle():
        key_file = KeyFile(lambda: read_keys(["a"], None), None)
        key_file.watch.start()
        await key_file.watch.stop()
        assert key_file.reload()
        return key_file

    assert accepted(asyncio.run(idle()), "a")
