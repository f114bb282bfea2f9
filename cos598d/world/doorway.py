"""How the other ranks find rank 0: where it listens, and who answers there."""

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cos598d.errors import UserError
from cos598d.world.channel import Refusal, Stranger, make_key
from cos598d.world.launch import Identity, check_launcher, inherited_listener, place_of
from cos598d.world.network import listening_place
from cos598d.world.store import RankStore

POLL_SECONDS = 0.05
# A meeting point that was reached greets in milliseconds; a busy host may take longer.
GREETING_SECONDS = 10.0
HANGING_UP_SECONDS = 5.0  # how long one may close its door on us before it is taken for another program
TELL_SECONDS = 2.0  # what is waited for longer is said
QUEUE = 1024


def open_listener(identity: Identity) -> socket.socket:
    """Rank 0's listening socket: the starter's, or one at the meeting point's address.

    Where torchrun's agent has that port for a store of its own, another port, which is made known there.
    """
    inherited = inherited_listener()
    if inherited:
        inherited.listen(QUEUE)
        return inherited
    listener = listen(identity.meeting_ip, 0 if identity.store_is_served else identity.master_port)
    if identity.store_is_served:
        port = listener.getsockname()[1]
        _agents_store(identity).set("port", json.dumps([port, _proof(identity, port)]))
    return listener


def listen(ip: str, port: int, at_once: bool = True) -> socket.socket:
    """A socket that listens at this host's own address `ip`, or only takes the place (`at_once` False).

    Raises UserError where it cannot.
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
        else:  # else somebody else could take it too, before anybody listens there
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except PermissionError:
        listener.close()
        raise UserError(f"port {port} needs rights that this process has not: choose another --master_port.") from None
    except OSError:
        listener.close()
        _check_address(ip)
        raise UserError(
            f"port {port} on this host is taken by another program: "
            f"choose another --master_port, the same on every rank."
        ) from None
    return listener


def find_rank_0(identity: Identity, seconds: float, deadline: float, say: Callable[[str], None]) -> RankStore:
    """Knock at rank 0's door until it opens. `say` is called with a sentence where that takes long."""
    key = make_key(identity.secret, "meeting", identity.run_id)
    started, said, hung_up = time.monotonic(), False, 0.0
    agent = _agents_store(identity) if identity.store_is_served else None
    while True:
        check_launcher()
        port = _published_port(identity, agent) if agent else identity.master_port
        try:
            if port:
                store = RankStore((identity.meeting_ip, port), key, identity.rank, seconds, check_launcher)
                store.open(GREETING_SECONDS)
                return store
        except socket.gaierror:
            raise _unknown_host(identity.master_ip) from None
        except Refusal:
            raise UserError(
                f"rank 0 at {place_of(identity)} has another secret or is of another run: start all ranks as the same "
                f"user or with the same --secret, and each run with a --master_port of its own."
            ) from None
        except Stranger:
            raise _is_another(identity) from None
        except (ConnectionResetError, BrokenPipeError):
            hung_up = hung_up or time.monotonic()
            if time.monotonic() - hung_up > HANGING_UP_SECONDS:
                raise _is_another(identity) from None
        except OSError:
            hung_up = 0.0
        now = time.monotonic()
        if now > deadline:
            raise UserError(
                f"rank 0 is missing: nothing answered at {place_of(identity)} within {seconds:g} s; start it there "
                f"(--local_rank 0) or correct --master_ip and --master_port."
            )
        if not said and now - started > TELL_SECONDS:
            say(f"waiting for rank 0 at {place_of(identity)} ...")
            said = True
        time.sleep(POLL_SECONDS)


def _unknown_host(ip: str) -> UserError:
    return UserError(
        f"--master_ip {ip} is not a host that this one knows: give the address of rank 0's host, "
        f"the same on every rank (or MASTER_ADDR, under a launcher)."
    )


def _is_another(identity: Identity) -> UserError:
    return UserError(
        f"what answers at {place_of(identity)} is not rank 0 of this run: choose another --master_port, "
        f"the same on every rank."
    )


def _check_address(address: str) -> None:
    """Raise UserError if `address` is not this host's own, as rank 0's must be."""
    family, place = listening_place(address, 0)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            raise UserError(
                f"--master_ip {address} is not an address of this host, where rank 0 runs: give one of its own."
            ) from None


def _agents_store(identity: Identity) -> Store:
    """The store of torchrun's agent. Nothing is taken from it but a port, with a proof."""
    opened: list[Store] = []

    def open_it() -> None:
        try:
            seconds = timedelta(seconds=GREETING_SECONDS)
            place = identity.master_ip, identity.master_port
            opened.append(TCPStore(*place, is_master=False, wait_for_workers=False, timeout=seconds))
        except DistError:
            pass

    # torch waits without end for the greeting of a server that is no store, so it waits in a thread of its own.
    thread = threading.Thread(target=open_it, name="opening the store", daemon=True)
    thread.start()
    thread.join(GREETING_SECONDS)
    if not opened:
        raise _is_another(identity)
    return PrefixStore(f"cos598d/{identity.attempt}", opened[0])


def _published_port(identity: Identity, agent: Store) -> int | None:
    """The port that rank 0 has made known; None where there is none yet, or what is there is not rank 0's."""
    try:
        if not agent.check(["port"]):
            return None
        port, proof = json.loads(agent.get("port"))
        return port if hmac.compare_digest(proof, _proof(identity, port)) else None
    except DistError:
        raise UserError(f"torchrun's agent at {identity.master_ip}:{identity.master_port} is gone.") from None
    except (ValueError, TypeError, RecursionError):
        return None


def _proof(identity: Identity, port: int) -> str:
    return make_key(identity.secret, "port", identity.run_id, str(port)).hex()
