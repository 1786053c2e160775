"""Watts of one busy physical core by CPU model: published thermal design power over the number of cores.

Source: the makers' product pages (ark.intel.com, amd.com). It is an upper estimate of a core's average draw, and it
leaves out the rest of the machine. `energy.watts_per_core` overrides it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

WATTS_PER_CORE: Mapping[str, float] = MappingProxyType(
    {
        r"EPYC 9[0-9]{2}[45]": 3.75,  # 9654: 360 W, 96 cores
        r"EPYC 7[0-9]{2}3": 4.4,  # 7763: 280 W, 64 cores
        r"EPYC 7[0-9]{2}2": 3.5,  # 7742: 225 W, 64 cores
        r"EPYC": 4.4,  # a virtual machine's EPYC without a number
        r"Xeon.*Platinum 84": 6.25,  # 8480+: 350 W, 56 cores
        r"Xeon.*Platinum 83": 6.75,  # 8380: 270 W, 40 cores
        r"Xeon.*Gold 6[0-9]{3}": 7.5,  # 6248: 150 W, 20 cores
        r"Ryzen 9": 6.6,  # 5950X: 105 W, 16 cores
        r"Core.*i9": 5.2,  # 13900K: 125 W, 24 cores
        r"Core.*i[57]": 7.0,  # 1165G7: 28 W, 4 cores
    }
)
FALLBACK_WATTS_PER_CORE = 6.0
"""The middle of the table, for a CPU that is not in it."""


def watts_per_core(model_name: str, overrides: Mapping[str, float]) -> tuple[float, str]:
    """Watts of one busy core, and which line of which table said so.

    Raises:
        re.error: an override is not a regular expression.
    """
    for table, origin in ((overrides, "settings"), (WATTS_PER_CORE, "built-in table")):
        for pattern, watts in table.items():
            if re.search(pattern, model_name):
                return watts, f"{origin}: {pattern!r}"
    return FALLBACK_WATTS_PER_CORE, "fallback: CPU not in the table"
