"""Ranks that meet as threads of one process."""

from concurrent.futures import ThreadPoolExecutor

import psutil
from programs import PATIENCE, free_port, wait_until

from cos598d.world.identity import Identity
from cos598d.world.rendezvous import meet

SECRET = b"only the ranks of this test know it"


def identities(world_size, port=None, secret=SECRET, **others):
    port = port or free_port()
    return [
        Identity(rank, world_size, "127.0.0.1", port, secret=secret, silence_seconds=8, **others)
        for rank in range(world_size)
    ]


def met(them, between=lambda port: None, seconds=60):
    """Let each of `them` meet in its own thread. `between` is called once rank 0 listens, before the others."""
    with ThreadPoolExecutor(len(them)) as pool:
        first = pool.submit(meet, them[0], seconds, {})
        wait_until(lambda: first.done() or is_open(them[0].master_port))
        between(them[0].master_port)
        return [future.result(PATIENCE) for future in [first, *(pool.submit(meet, it, seconds, {}) for it in them[1:])]]


def is_open(port):
    return any(
        c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in psutil.Process().net_connections("inet")
    )


def all_at_once(meetings, function):
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(function, meetings))


def exchange_works(meetings):
    """Whether every rank gets every rank's value."""
    found = all_at_once(meetings, lambda meeting: meeting.exchange({"rank": meeting.identity.rank}))
    return found == [[{"rank": rank} for rank in range(len(meetings))]] * len(meetings)
