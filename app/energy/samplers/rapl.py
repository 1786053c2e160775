"""Energy of the CPU packages from the kernel's powercap files (RAPL)."""

from __future__ import annotations

from pathlib import Path

from app.energy.samplers.base import MeterInfo, MeterUnavailable, Method, Point, Sample

_BLUR_S = 0.001
"""The counters are updated about every millisecond (Intel SDM, vol. 3B, 16.10)."""
_UJ_PER_J = 1e6


class _Domain:
    """One counter. It counts microjoules from 0 to `max_energy_range_uj` and starts again."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self.name = (folder / "name").read_text().strip()
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = self._read_uj()

    def advance_uj(self) -> int:
        now_uj = self._read_uj()
        passed_uj = now_uj - self._last_uj
        if passed_uj < 0:
            passed_uj += self._range_uj + 1
        self._last_uj = now_uj
        return passed_uj

    def _read_uj(self) -> int:
        value_uj = int(self._file.read_text())
        if not 0 <= value_uj <= self._range_uj:
            raise ValueError(f"{self._file} reads {value_uj}, outside 0..{self._range_uj}")
        return value_uj


class RaplSampler:
    """All CPU packages together, with their memory where the kernel shows it.

    Raises:
        MeterUnavailable: no such files (most virtual machines), or not readable for this user.
    """

    def __init__(self, root: Path = Path("/sys/class/powercap"), period_s: float = 0.05) -> None:
        self.period_s = period_s
        try:
            # `intel-rapl:0` is a package (AMD's too); `intel-rapl:0:1` a part of it, of which only memory is not
            # already counted in the package.
            packages = [_Domain(path) for path in sorted(root.glob("intel-rapl:*")) if path.name.count(":") == 1]
            parts = [_Domain(path) for path in sorted(root.glob("intel-rapl:*:*"))]
        except PermissionError as error:
            raise MeterUnavailable(f"{error.filename} is readable by root only") from error
        except (OSError, ValueError) as error:
            raise MeterUnavailable(f"{root}: {error}") from error
        self._domains = [domain for domain in packages if domain.name.startswith("package")]
        if not self._domains:
            raise MeterUnavailable(f"{root} has no CPU package; a virtual machine usually has none")
        self._domains += [domain for domain in parts if domain.name == "dram"]
        self._energy_j = 0.0
        self._broken = False
        names = ", ".join(domain.name for domain in self._domains)
        self._info = MeterInfo("cpu", "CPU packages", Method.RAPL, f"whole CPU: {names}", blur_s=_BLUR_S)

    @property
    def info(self) -> MeterInfo:
        return self._info

    def sample(self, now_s: float) -> Sample:
        try:
            self._energy_j += sum(domain.advance_uj() for domain in self._domains) / _UJ_PER_J
        except (OSError, ValueError) as error:
            self._broken = True
            return Sample(now_s, event=f"read_error: {error}")
        unbroken, self._broken = not self._broken, False
        return Sample(now_s, Point(now_s, self._energy_j, _BLUR_S), unbroken=unbroken)

    def watch(self, engine: str, process_id: int) -> None:
        """Unused: the packages are measured as a whole."""

    def close(self) -> None:
        """Nothing is held open."""
