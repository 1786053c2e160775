"""One gloo device for all process groups of a process.

vLLM makes a dozen groups, each with a device of its own, whose thread wakes a hundred times a second whether or not
there is anything to do: 2 % of a core for each idle engine. Groups may share a device.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed


def register() -> None:
    """Called by vLLM in each of its processes."""
    if not torch.distributed.is_gloo_available():
        return
    from torch.distributed import ProcessGroupGloo

    if getattr(ProcessGroupGloo.__init__, "__module__", None) == __name__:
        return
    create: Any = ProcessGroupGloo.__init__
    shared: list[Any] = []

    def create_on_shared(
        self: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30), **others: Any
    ) -> None:
        if isinstance(timeout, timedelta) and not others:
            if not shared:
                shared.append(ProcessGroupGloo.create_default_device())
            options: Any = ProcessGroupGloo._Options()
            options._timeout, options._devices = timeout, list(shared)
            create(self, store, rank, size, options)
        else:
            # The other signature: the caller chooses the devices.
            create(self, store, rank, size, timeout, **others)

    ProcessGroupGloo.__init__ = create_on_shared
