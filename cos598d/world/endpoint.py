"""Rank 0's endpoint: where it listens, and how the other ranks find it there and nothing else."""

import errno
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cos598d.errors import UserError
from cos598d.world.connection import AuthenticationError, ProtocolError, make_key
from cos598d.world.identity import LISTENER, Identity, check_launcher
from cos598d.world.network import listening_place
from cos598d.world.store import StoreClient

POLL_SECONDS = 0.05
# Rank 0 greets a connection within milliseconds; on a busy host it may take longer.
GREETING_SECONDS = 10.0
HANGING_UP_SECONDS = 5.0  # a program that closes our connections for this long is not rank 0
TELL_SECONDS = 2.0  # a rank that waits longer prints a line
QUEUE = 1024  # of connections that are not accepted yet


def open_listener(identity: Identity) -> socket.socket:
    """Rank 0's listening socket: the launcher's, or one at its own address and --master_port.

    If torchrun's agent uses that port for its own store, it is another port, which is published in that store.
    """
    descriptor = os.environ.pop(LISTENER, None)  # can be taken only once
    if descriptor:
        inherited = socket.socket(fileno=int(descriptor))
        # Without this, closed connections of an earlier attempt would block the port for a minute.
        inherited.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        inherited.listen(QUEUE)
        return inherited
    listener = listen(identity.listening_ip, 0 if identity.store_is_served else identity.master_port)
    if identity.store_is_served:
        port = listener.getsockname()[1]
        _agents_store(identity).set("port", json.dumps([port, _proof(identity, port)]))
    return listener


def listen(ip: str, port: int, at_once: bool = True) -> socket.socket:
    """A socket that listens at this host's own address `ip`, or only reserves the port (`at_once` False).

    Raises UserError if the address is not this host's, or if the port is taken or not allowed.
    """
    try:
        family, place = listening_place(ip, port)
    except socket.gaierror:
        raise _unknown_host(ip) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        if at_once:
            listener.listen(QUEUE)
        else:  # while nothing listens there, another socket with this option could bind the port too
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            fault = f"port {port} needs rights that this process lacks. Choose another --master_port."
        elif error.errno == errno.EADDRINUSE:
            fault = (
                f"port {port} on this host is taken by another program. "
                f"Choose another --master_port, the same on every rank."
            )
        else:
            fault = f"--master_ip {ip} is not an address of this host, where rank 0 runs. Give one of its own."
        raise UserError(fault) from None
    return listener


def find_rank_0(identity: Identity, seconds: float, deadline: float, say: Callable[[str], None]) -> StoreClient:
    """Connect to rank 0, retrying until it answers. `say` is called with a sentence if that takes long.

    Raises UserError if nothing has answered by `deadline`, or if something other than this run's rank 0 answers. If
    torchrun has restarted the ranks, the port in its agent's store may be an earlier rank 0's, and another program's by
    now. Then a wrong answer counts only at the deadline, since rank 0 may publish its own port until then.
    """
    key = make_key(identity.secret, "meeting", identity.run_id)
    started, said, hung_up_since = time.monotonic(), False, 0.0
    wrong: UserError | None = None
    agent = _agents_store(identity) if identity.store_is_served else None
    while True:
        check_launcher()
        port = _published_port(identity, agent) if agent else identity.master_port
        try:
            if port:
                store = StoreClient((identity.listening_ip, port), key, identity.rank, seconds, check_launcher)
                store.open(GREETING_SECONDS)
                return store
        except socket.gaierror:
            raise _unknown_host(identity.master_ip) from None
        except AuthenticationError:
            wrong = UserError(
                f"rank 0 at {identity.endpoint} has another secret or belongs to another run. Start all ranks as the "
                "same "
                f"user or with the same --secret, and give each run a --master_port of its own."
            )
        except ProtocolError:
            wrong = _not_rank_0(identity)
        except (ConnectionResetError, BrokenPipeError):
            hung_up_since = hung_up_since or time.monotonic()
            if time.monotonic() - hung_up_since > HANGING_UP_SECONDS:
                wrong = _not_rank_0(identity)
        except OSError:
            hung_up_since, wrong = 0.0, None
        now = time.monotonic()
        if wrong and (agent is None or now > deadline):
            raise wrong
        if now > deadline:
            raise UserError(
                f"rank 0 is missing: nothing answered at {identity.endpoint} within {seconds:g} s. Start it there "
                f"(--local_rank 0) or correct --master_ip and --master_port."
            )
        if not said and now - started > TELL_SECONDS:
            say(f"waiting for rank 0 at {identity.endpoint} ...")
            said = True
        time.sleep(POLL_SECONDS)


def _unknown_host(ip: str) -> UserError:
    return UserError(
        f"--master_ip {ip} cannot be resolved on this machine. Give the address of rank 0's host, "
        f"the same on every rank (or MASTER_ADDR, under a launcher)."
    )


def _not_rank_0(identity: Identity) -> UserError:
    return UserError(
        f"something other than rank 0 of this run answers at {identity.endpoint}. Choose another --master_port, "
        f"the same on every rank."
    )


def _agents_store(identity: Identity) -> Store:
    """The store of torchrun's agent. It is not trusted: it only holds rank 0's port, with a proof."""
    opened: list[Store] = []

    def open_it() -> None:
        try:
            seconds = timedelta(seconds=GREETING_SECONDS)
            place = identity.master_ip, identity.master_port
            opened.append(TCPStore(*place, is_master=False, wait_for_workers=False, timeout=seconds))
        except DistError:
            pass

    # torch would wait forever for the greeting of a server that is not a store, so it waits in a thread of its own.
    thread = threading.Thread(target=open_it, name="opening the store", daemon=True)
    thread.start()
    thread.join(GREETING_SECONDS)
    if not opened:
        raise UserError(
            f"no store of torchrun's answers at {identity.endpoint}. Choose another --master_port, or for elastic "
            "runs export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun."
        )
    return PrefixStore("cos598d", opened[0])


def _published_port(identity: Identity, agent: Store) -> int | None:
    """The port that rank 0 has published; None if there is none yet, or if something else wrote it."""
    try:
        if not agent.check(["port"]):
            return None
        port, proof = json.loads(agent.get("port"))
        return port if hmac.compare_digest(proof, _proof(identity, port)) else None
    except DistError:
        raise UserError(
            f"lost connection to torchrun's agent at {identity.endpoint}. Check whether torchrun still runs there."
        ) from None
    except (ValueError, TypeError, RecursionError):
        return None


def _proof(identity: Identity, port: int) -> str:
    return make_key(identity.secret, "port", identity.run_id, str(port)).hex()
