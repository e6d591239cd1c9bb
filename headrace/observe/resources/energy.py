"""Energy of the processor packages, from the RAPL counters of Linux (``/sys/class/powercap``).

The counters are often readable by root only, and missing in virtual machines. Then energy is not measured.
"""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_PACKAGES = "intel-rapl:?"  # also the name of AMD's driver; subdomains of packages have a second number


class RaplEnergy:
    """Joules of all packages since construction; handles counters that wrap, if it is read often enough."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._domains = {}
        self._joules = 0.0
        for domain in sorted(folder.glob(_PACKAGES)):
            try:
                limit = int((domain / "max_energy_range_uj").read_text())
                self._domains[domain] = (int((domain / "energy_uj").read_text()), limit)
            except (OSError, ValueError):
                continue

    @property
    def measurable(self) -> bool:
        """Whether a package has a counter that this process may read."""
        return bool(self._domains)

    def joules(self) -> float:
        """Joules since this object was made."""
        for domain, (last, limit) in self._domains.items():
            try:
                value = int((domain / "energy_uj").read_text())
            except (OSError, ValueError):
                continue
            self._joules += (value - last + (limit if value < last else 0)) / 1e6
            self._domains[domain] = (value, limit)
        return self._joules
