"""Horovod: averages gradients tensor by tensor, fused, in a thread of its own."""

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import nn
from torch.distributed import Store

from cos598d.comm.communicator import Communicator
from cos598d.errors import UsageError, UserError
from cos598d.records.conventions import BY_COUNTERS
from cos598d.strategies.base import MakeOptimizer, Module
from cos598d.strategies.engines.engine import Engine, need
from cos598d.strategies.formula import MemoryBytes, MemoryEstimate, TrainingSpec, replicated_memory
from cos598d.sync.estimate import Buffers
from cos598d.world.network import INTERFACE_VARIABLE, interface_of, is_loopback, network_identity

_MANY = 1 << 30  # more backward passes than any step has
_meetings = itertools.count()


class Horovod(Engine):
    """Horovod's DistributedOptimizer around torch's (Sergeev and Del Balso, "Horovod", 2018), on its own gloo.

    1. A hook on each parameter passes its gradient, by name, to Horovod's thread while backward still runs.
    2. Every millisecond the threads report to rank 0 which tensors they have. Those that all ranks have are packed, up
       to 128 MiB, and averaged by a ring all-reduce. So ranks may produce them in different orders.
    3. The step waits for all of them. Then every rank clips the averages and makes the same step.

    Cost for a gradient of S bytes: every rank sends and receives 2(n-1)/n S, half of that with `--compress fp16`. The
    threads add 0.1 MB per second. Memory: S each of weights and gradients, with AdamW 2 S of state, and the thread's
    buffer of up to 128 MiB. Choose it if you already use it. Its last version is from 2023, and does not compile with a
    new torch without the patches of `make engines`.

    We start the ranks. Their gloo meets through the run's own store: on each rank a small server on the loopback
    address replaces the one that horovodrun would start, until Horovod is initialized. The ledger sees none of
    Horovod's calls: its bytes are those that the kernel counts.

    Known wrong: between hosts it connects to the address of the host's name, whatever interface it is given; a loopback
    address there is refused here. An unused parameter gets zeros, so AdamW still decays it. `broadcast_optimizer_state`
    makes a step with a fresh Adam; we skip it, since all optimizers are fresh. bfloat16 tensors are refused. Which
    tensors are packed together depends on timing, and so does the order of sums. On three ranks or more, no run or
    resume reproduces another to the last bit.
    """

    uses = ("compress",)
    bytes_from = BY_COUNTERS

    @classmethod
    def check_config(cls, config: Any, world_size: int) -> None:
        super().check_config(config, world_size)
        need("horovod", "Horovod", "0.28", config.sync)
        if config.compress not in (None, "fp16"):
            raise UsageError(f"--compress {config.compress} does not work with --sync horovod. Choose fp16.")
        if torch.cuda.is_available() and not config.no_cuda:
            raise UsageError("Horovod is built without CUDA here. Add --no_cuda, or choose another --sync.")

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> Module:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            _check_names(self.comm)
            _meet(hvd, self.comm)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.optimizer: Any = hvd.DistributedOptimizer(
            make_optimizer(model.named_parameters()),
            named_parameters=named,
            compression=hvd.Compression.fp16 if self.options.compress else hvd.Compression.none,
        )
        return model

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.optimizer.set_backward_passes_per_step(_MANY)
        yield
        self.optimizer.set_backward_passes_per_step(1)

    def backward(self, loss: torch.Tensor) -> None:
        with _lost_rank_is_reported():
            super().backward(loss)

    def finish(self) -> None:
        with _lost_rank_is_reported():
            self.optimizer.synchronize()

    def expected_memory(self, job: TrainingSpec) -> MemoryEstimate:
        def seen(held: MemoryBytes | None) -> MemoryBytes | None:
            return held and {name: size for name, size in held.items() if name != "buckets"}

        found = replicated_memory(job, Buffers())
        unsaid = "Horovod's own buffer of up to 128 MiB is not counted"
        return MemoryEstimate(seen(found.between_steps), seen(found.peak), unsaid)

    def step(self) -> bool:
        with self.optimizer.skip_synchronize():
            return super().step()

    def detach(self) -> None:
        super().detach()
        # its hooks stay on the parameters as long as anything refers to it
        self.optimizer.set_backward_passes_per_step(_MANY)
        del self.optimizer


@contextlib.contextmanager
def _lost_rank_is_reported() -> Iterator[None]:
    """Raise Horovod's error as that of a broken collective: a rank is lost, and the watchdog will report which."""
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except HorovodInternalError as error:
        raise RuntimeError(f"Connection closed: {str(error).split('. ')[0]}") from None


def _check_names(comm: Communicator) -> None:
    """Raise UserError, on every rank, if a host's name does not lead other hosts to it."""
    found = comm.exchange([network_identity(), _address_of_name()])
    if len({network for network, _ in found}) == 1:
        return
    for rank, (_, address) in enumerate(found):
        if not address or is_loopback(address):
            raise UserError(
                f"--sync horovod connects to hosts by name, and the name of rank {rank}'s host resolves to "
                f"{address or 'no address'}. Give it the host's own address in /etc/hosts, or choose another --sync."
            )


def _address_of_name() -> str:
    """The address of this host by its name; "" if there is none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _meet(hvd: Any, comm: Communicator) -> None:
    """Initialize Horovod on the existing ranks, each as a host of its own."""
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0] or interface_of("127.0.0.1") or "lo"
    with _rendezvous(comm.store, f"horovod/{next(_meetings)}") as port:
        os.environ |= {
            "HOROVOD_HOSTNAME": f"rank{comm.rank}",
            "HOROVOD_RANK": str(comm.rank),
            "HOROVOD_SIZE": str(comm.world_size),
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(comm.rank),
            "HOROVOD_CROSS_SIZE": str(comm.world_size),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": interface,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(min(comm.timeout_seconds, 1 << 20)))),
            "HOROVOD_LOG_LEVEL": "fatal",
        }
        hvd.init()


@contextlib.contextmanager
def _rendezvous(store: Store, prefix: str) -> Iterator[int]:
    """A server on this host's loopback address that keeps Horovod's keys in `store`. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            key = prefix + self.path
            self._answer(bytes.fromhex(store.get(key).decode()) if store.check([key]) else None)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            store.set(prefix + self.path, body.hex())
            self._answer(b"")

        def do_DELETE(self) -> None:
            self._answer(b"")  # the keys belong to this rendezvous only, so nothing is deleted

        def _answer(self, body: bytes | None) -> None:
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
