"""Energy of the processor packages."""

from __future__ import annotations

from pathlib import Path

from headrace.observe.resources.energy import RaplEnergy


def package(folder: Path, name: str, microjoules: int, limit: int = 10_000_000) -> Path:
    domain = folder / name
    domain.mkdir(exist_ok=True)
    (domain / "energy_uj").write_text(f"{microjoules}\n")
    (domain / "max_energy_range_uj").write_text(f"{limit}\n")
    return domain


def test_packages_are_added_up_and_parts_of_them_are_not(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 1_000_000)
    package(tmp_path, "intel-rapl:1", 2_000_000)
    package(tmp_path, "intel-rapl:0:0", 500_000)
    rapl = RaplEnergy(tmp_path)
    assert rapl.measurable
    assert rapl.joules() == 0.0
    package(tmp_path, "intel-rapl:0", 1_500_000)
    package(tmp_path, "intel-rapl:1", 4_000_000)
    package(tmp_path, "intel-rapl:0:0", 900_000)
    assert rapl.joules() == 2.5


def test_a_counter_that_wraps(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 9_000_000)
    rapl = RaplEnergy(tmp_path)
    package(tmp_path, "intel-rapl:0", 1_000_000)
    assert rapl.joules() == 2.0


def test_what_cannot_be_read_is_not_measurable(tmp_path: Path) -> None:
    assert not RaplEnergy(tmp_path / "missing").measurable
    (package(tmp_path, "intel-rapl:0", 1) / "energy_uj").unlink()
    assert not RaplEnergy(tmp_path).measurable


def test_a_counter_that_disappears_keeps_its_value(tmp_path: Path) -> None:
    domain = package(tmp_path, "intel-rapl:0", 1_000_000)
    rapl = RaplEnergy(tmp_path)
    package(tmp_path, "intel-rapl:0", 3_000_000)
    assert rapl.joules() == 2.0
    (domain / "energy_uj").unlink()
    assert rapl.joules() == 2.0
