"""The processor's name. Standard library alone: the energy self-check needs it where nothing else is installed."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the kernel tells it, or the machine type."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()
