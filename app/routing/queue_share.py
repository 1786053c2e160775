"""How many places of an engine's queue one tenant may fill, so that a light tenant finds one behind a heavy one.

Source: Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches (IEEE/ACM Transactions
on Networking, 1998). Each tenant may hold a multiple of the places that are still free. It needs no list of who is
active, and always leaves room for one who is not yet there: of n tenants with equal shares that all want more, each
gets 1 / (n + 1) of the queue.
"""

from __future__ import annotations


def has_its_share(held: int, free: int, share: float = 1.0) -> bool:
    """A tenant that holds `held` places must wait for one of its own to end, with `free` places left.

    Args:
        share: weight of the tenant, above 0; with 2 it may hold twice the places that are free.

    One that holds nothing never has its share: a full queue, and not this, keeps it out.
    """
    return held > 0 and held >= share * free
