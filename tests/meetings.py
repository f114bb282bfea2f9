"""Ranks that meet as threads of one process, for tests of what they meet at."""

from concurrent.futures import ThreadPoolExecutor

import psutil
from programs import PATIENCE, free_port, wait_until

from cos598d.errors import UserError
from cos598d.world.identity import Identity
from cos598d.world.rendezvous import meet

SECRET = b"only the ranks of this test know it"


def identities(world_size, port=None, secret=SECRET, **others):
    port = port or free_port()
    return [
        Identity(rank, world_size, "127.0.0.1", port, secret=secret, silence_seconds=8, **others)
        for rank in range(world_size)
    ]


def met(them, between=lambda port: None, seconds=60, facts=None):
    """Let every one of `them` meet in a thread of its own; `between` is called when rank 0 listens, before the rest."""

    def one(identity):
        try:
            return meet(identity, seconds, facts or {})
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(them)) as pool:
        first = pool.submit(one, them[0])
        wait_until(lambda: first.done() or is_open(them[0].master_port))
        between(them[0].master_port)
        return [future.result(PATIENCE) for future in [first, *(pool.submit(one, it) for it in them[1:])]]


def is_open(port):
    return any(
        c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in psutil.Process().net_connections("inet")
    )


def all_exchange(meetings):
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(lambda meeting: meeting.exchange({"rank": meeting.identity.rank}), meetings))
