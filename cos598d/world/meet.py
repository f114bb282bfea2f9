"""The ranks of a run meet at a TCPStore of torch's, and are compared.

Rank 0 serves the store at --master_ip; under torchrun, its agent already does. Then:

1. Rank 0 puts a random number into the store. Every rank answers with a digest of it under the run's secret, and with
   the flags that must be equal on all ranks.
2. Rank 0 compares them, and puts a verdict into the store: each rank's host, or one sentence that all ranks print.

The secret decides who belongs together: two runs, or two users, never become one run by accident. It does not keep out
an attacker: whoever reaches the port can read and change the store, as he can reach gloo's own connections.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cos598d.errors import WARNING, UsageError, UserError
from cos598d.terminal.files import cache_folder
from cos598d.terminal.words import ranks_in_words
from cos598d.world.identity import LISTENER, SECRET_VARIABLE, Identity
from cos598d.world.meeting import Meeting
from cos598d.world.network import address_facing, choose_interface, is_loopback, network_identity
from cos598d.world.waiting import wait

LINGER_SECONDS = 5.0  # how long rank 0 stays after a failure: its end would end the store, before others have heard
GREETING_SECONDS = 10.0  # how long a program at rank 0's port may take to answer as a store


def meet(identity: Identity, seconds: float, facts: Mapping[str, Any]) -> Meeting:
    """Meet the other ranks within `seconds`, and check that `facts` (flag: JSON value) are the same on all.

    Raises UserError, the same on every rank that arrived: for missing ranks, and for one that came twice, with another
    secret or with other flags.
    """
    secret = find_secret(identity)
    place = identity.endpoint
    try:
        store = _own_part(identity, open_store(identity, seconds))
        if store.add(f"came/{identity.rank}", 1) > 1:
            raise UserError(f"rank {identity.rank} was started twice for {place}. Give each run its own --master_port.")
        if identity.rank == 0:
            store.set("nonce", f"{identity.world_size} {secrets.token_hex(16)}")
        if not wait(lambda: store.check(["nonce"]), seconds, _said(identity, lambda: [0])):
            raise UserError(f"rank 0 did not come to {place} within {seconds:g} s. Start it there (--local_rank 0).")
        size = store.get("nonce").decode().partition(" ")[0]
        if size and int(size) != identity.world_size:
            _object(identity, store, f"was started with --world_size {identity.world_size} and rank 0 with {size}")
        own = address_facing(identity.listening_ip)
        proof = _proof(secret, store, identity.rank)
        me = {"proof": proof, "host": network_identity(), "address": own, "facts": dict(facts)}
        store.set(f"hello/{identity.rank}", json.dumps(me))
        if identity.rank == 0:
            store.set("verdict", json.dumps(_judge(identity, store, secret, seconds)))
        if not wait(lambda: store.check(["verdict"]), seconds + LINGER_SECONDS):
            raise UserError(f"rank 0 does not answer at {place}. See its own error.")
        error, hosts, elsewhere = json.loads(store.get("verdict"))
        if error:
            _stay(identity, store)
            raise UserError(error)
    except dist.DistError:
        raise UserError(f"rank 0 at {place} has ended. See its own error.") from None
    # Where rank 0's name means loopback on its own host, the ranks there take the interface that faces another host.
    choose_interface(elsewhere if elsewhere and own and is_loopback(own) else identity.listening_ip)
    return Meeting(identity, store, hosts, seconds)


def tell_failure(identity: Identity, sentence: str) -> None:
    """Tell the ranks that wait for this one, or come a moment later, that it has failed before it could meet them."""
    with contextlib.suppress(UserError, dist.DistError):
        store = _own_part(identity, open_store(identity, LINGER_SECONDS))
        error = json.dumps([f"rank {identity.rank} could not start: {sentence}", [], None])
        if identity.rank == 0:
            store.set("verdict", error)
            store.set("nonce", "")
            time.sleep(LINGER_SECONDS)
        else:
            store.set("objection", error)


def open_store(identity: Identity, seconds: float) -> dist.Store:
    """The store where ranks meet, served here if this is rank 0. Raises UserError if that cannot be."""
    host, port, patience = identity.listening_ip, identity.master_port, timedelta(seconds=seconds)
    if identity.rank == 0 and not identity.store_is_served:
        handed = os.environ.pop(LISTENER, None)  # by the launcher, which has bound it
        listener = socket.socket(fileno=int(handed)) if handed else bind(host, port)
        listener.listen(1024)
        return dist.TCPStore(host, port, None, True, patience, False, master_listen_fd=listener.detach())
    try:
        if not wait(lambda: _answers(host, port), seconds, _said(identity, lambda: [0])):
            raise UserError(
                f"rank 0 is missing: nothing answered at {identity.endpoint} within {seconds:g} s. Start it there "
                "(--local_rank 0) or correct --master_ip and --master_port."
            )
    except OSError as error:
        raise UserError(
            f"--master_ip {host} cannot be reached ({error.strerror or error}). Give rank 0's address."
        ) from None
    opened: list[dist.Store] = []  # in a thread: torch would wait forever for the greeting of another program

    def open_it() -> None:
        with contextlib.suppress(Exception):
            opened.append(dist.TCPStore(host, port, None, False, patience))

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(GREETING_SECONDS)
    if not opened:
        raise UserError(f"something other than rank 0 answers at {identity.endpoint}. Choose another --master_port.")
    return opened[0]


def bind(ip: str, port: int) -> socket.socket:
    """A socket that is bound to this host's own address `ip`, and nothing else. Raises UserError if it cannot be.

    The exception is a name that means loopback here, as Debian's /etc/hosts has it, and may mean another address
    elsewhere: it is bound to all addresses.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_name_of_loopback = not is_loopback(ip) and is_loopback(str(place[0]))
        listener.bind(("", port) if is_name_of_loopback else place)
        return listener
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen at {ip}:{port} ({error.strerror}). Give an address of this host as --master_ip, "
            "and a free --master_port, the same on every rank."
        ) from None


def find_secret(identity: Identity) -> bytes:
    """COS598D_SECRET; else, if all ranks are on this host, this user's own, in a file that only they can read."""
    given = os.environ.get(SECRET_VARIABLE, "").encode()
    if given:
        return given
    if not is_loopback(identity.listening_ip):
        if identity.rank == 0:
            words = f"this run has no secret: anybody who reaches {identity.endpoint} can become one of its ranks."
            print(f"{WARNING}{words} Set {SECRET_VARIABLE} to the same on every rank.", file=sys.stderr)
        return b""
    path = cache_folder() / "secret"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(path, "xb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
        file.write(secrets.token_hex(32).encode())
    if path.stat().st_uid != os.geteuid() or path.stat().st_mode & 0o077:
        raise UsageError(f"{path} can be read by other users. Delete it.")
    return path.read_bytes()


def _own_part(identity: Identity, store: dist.Store) -> dist.Store:
    """A run's own keys. torchrun's store also serves torch itself, and each restart, which all its ranks count alike.

    A store that rank 0 serves has only this start's ranks. Hosts that join and leave count restarts differently.
    """
    start = f"/{identity.run_id}/{identity.attempt}" if identity.store_is_served else ""
    return dist.PrefixStore(f"cos598d{start}", store)


def _said(identity: Identity, ranks: Callable[[], Collection[int]]) -> Callable[[], str] | None:
    """For whom this rank waits, if it prints that."""
    return (lambda: f"{ranks_in_words(sorted(ranks()))} at {identity.endpoint}") if identity.speaks else None


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(ConnectionError, TimeoutError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _object(identity: Identity, store: dist.Store, what: str) -> None:
    """End this rank, which cannot belong to the run, and tell rank 0 why."""
    error = f"rank {identity.rank} {what}. Give every rank the same."
    store.set("objection", json.dumps([error, [], None]))
    raise UserError(error)


def _stay(identity: Identity, store: dist.Store) -> None:
    """Let the others read the verdict before rank 0 ends with the store, also those that come a moment later."""
    store.add("heard", 1)
    if identity.rank == 0:
        wait(lambda: store.add("heard", 0) == identity.world_size, LINGER_SECONDS)


def _judge(identity: Identity, store: dist.Store, secret: bytes, seconds: float) -> tuple[str, list[int], str | None]:
    """Rank 0's verdict: why there is no run, or the number of each rank's host; and the address of one elsewhere."""
    missing = set(range(identity.world_size))
    hosts: dict[int, str] = {}
    addresses: dict[int, str] = {}
    facts: dict[str, Any] = {}
    wrong: list[str] = []

    def all_came() -> bool:
        if store.check(["objection"]):
            wrong.append(json.loads(store.get("objection"))[0])
        for rank in sorted(rank for rank in missing if store.check([f"hello/{rank}"])):
            its = json.loads(store.get(f"hello/{rank}"))
            missing.discard(rank)
            hosts[rank], addresses[rank] = its["host"], its["address"] or ""
            facts.update({} if facts else its["facts"])
            if not hmac.compare_digest(its["proof"], _proof(secret, store, rank)):
                wrong.append(f"rank {rank} has another {SECRET_VARIABLE} than rank 0, or belongs to another run.")
            for flag, value in facts.items():
                if its["facts"].get(flag) != value:
                    said = f"rank {rank} was started with --{flag} {its['facts'].get(flag)} and rank 0 with {value}"
                    wrong.append(f"{said}. Give every rank the same.")
        return bool(wrong) or not missing

    if not wait(all_came, seconds, _said(identity, lambda: missing)):
        late = (
            f"{ranks_in_words(sorted(missing))} did not come to {identity.endpoint} within {seconds:g} s (--timeout)."
        )
        wrong.append(f"{late} Start every rank with the same --master_ip and --master_port.")
    if wrong:
        return wrong[0], [], None
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))}
    elsewhere = next((each for _, each in sorted(addresses.items()) if each and not is_loopback(each)), None)
    return "", [numbers[hosts[rank]] for rank in sorted(hosts)], elsewhere


def _proof(secret: bytes, store: dist.Store, rank: int) -> str:
    return hmac.new(secret or b"none", store.get("nonce") + str(rank).encode(), "sha256").hexdigest()
