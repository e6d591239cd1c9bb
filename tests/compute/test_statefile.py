from __future__ import annotations

from pathlib import Path

import pytest

from headrace.compute.blockfile import NotUsable, SavedState, read_states, write_states

IDENTITY = {"fingerprint": "abc", "state_bytes": 8}
STATES = [SavedState(bytes([number]) * 32, number, bytes(range(number, number + 8))) for number in range(3)]


def test_states_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "states"
    assert write_states(path, IDENTITY, STATES) == 3
    assert list(read_states(path, IDENTITY, 8)) == STATES
    assert path.stat().st_mode & 0o077 == 0


def test_states_of_another_engine_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "states"
    write_states(path, IDENTITY, STATES)
    with pytest.raises(NotUsable, match="its fingerprint is 'abc', not 'd'"):
        list(read_states(path, {**IDENTITY, "fingerprint": "d"}, 8))
    path.write_bytes(b"something else")
    with pytest.raises(NotUsable, match="not a file of states"):
        list(read_states(path, IDENTITY, 8))


@pytest.mark.parametrize("at", [-1, -8])
def test_a_damaged_state_is_skipped(tmp_path: Path, at: int) -> None:
    path = tmp_path / "states"
    write_states(path, IDENTITY, STATES)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert list(read_states(path, IDENTITY, 8)) == STATES[:2]
    path.write_bytes(content[:-3])
    assert list(read_states(path, IDENTITY, 8)) == STATES[:2]


def test_a_damaged_key_finds_no_block(tmp_path: Path) -> None:
    """The checksum covers key and place, too: a state under a wrong key would be a wrong state."""
    path = tmp_path / "states"
    write_states(path, IDENTITY, STATES)
    content = bytearray(path.read_bytes())
    begin = content.index(b"\n") + 1
    content[begin] ^= 1
    content[begin + 48 + 32] ^= 1
    path.write_bytes(content)
    assert list(read_states(path, IDENTITY, 8)) == STATES[2:]
