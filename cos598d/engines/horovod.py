"""Horovod: averages gradients tensor by tensor, fused, in a thread of its own."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cos598d.engines import need
from cos598d.errors import UsageError
from cos598d.records.conventions import BY_COUNTERS
from cos598d.sync.base import GradientSync
from cos598d.sync.options import Compression
from cos598d.world.network import INTERFACE_VARIABLE, interface_facing

_meetings = itertools.count()


@dataclass(frozen=True)
class HorovodOptions(Compression):
    """compress: fp16, or None."""


class Horovod(GradientSync):
    """Horovod's all-reduce (Sergeev and Del Balso, "Horovod", 2018), on its own gloo.

    1. When backward has computed a gradient, it is passed by name to Horovod's thread, while backward still runs.
    2. Every millisecond the threads report to rank 0 which tensors they have. Those that all ranks have are packed, up
       to 128 MiB, and averaged by a ring all-reduce. So ranks may produce them in different orders.
    3. The end of backward waits for all of them. Then every rank clips the averages and makes the same step.

    Cost for a gradient of S bytes: every rank sends and receives 2(n-1)/n S, half of that with `--compress fp16`. The
    threads add 0.1 MB per second. The ledger sees none of it: the bytes are those that the kernel counts. Memory: as
    `all_reduce`, and the thread's buffer of up to 128 MiB. Choose it if you already use it. Its last version is from
    2023, and does not compile with a new torch without the patches of `make engines`.

    Our ranks meet through the run's own store: on each rank a small server on the loopback address replaces the one
    that horovodrun would start, until Horovod is initialized.

    Known wrong: between hosts it connects to the address of the host's name, whatever interface it is given. bfloat16
    is refused. Which tensors are packed together depends on timing, and so does the order of sums: on three ranks or
    more, no run or resume reproduces another to the last bit.
    """

    options_kind = HorovodOptions
    options: HorovodOptions
    bytes_from = BY_COUNTERS

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("horovod", "Horovod", "0.28", "horovod")

    def attach(self, model: nn.Module) -> Callable:
        if self.options.compress not in (None, "fp16"):
            raise UsageError(f"--compress {self.options.compress} does not work with --sync horovod. Choose fp16.")
        call = super().attach(model)
        if self.device.type != "cpu":
            raise UsageError("Horovod is built without CUDA here. Add --no_cuda, or choose another --sync.")
        import horovod.torch as hvd

        if not hvd.is_initialized():
            _meet(hvd, self.rank, self.ranks)
        self._hvd = hvd
        self._codec = hvd.Compression.fp16 if self.options.compress else hvd.Compression.none
        self._names = {p: name for name, p in self.parameters}
        self._under_way: dict[nn.Parameter, tuple[int, Any]] = {}
        return call

    def ready(self, parameter: nn.Parameter) -> None:
        small, context = self._codec.compress(parameter.grad)
        name = self._names[parameter]
        with _lost_rank_is_reported():
            self._under_way[parameter] = self._hvd.allreduce_async_(small, name=name, op=self._hvd.Average), context

    def finish(self) -> None:
        used = self.agree([p in self._under_way or p.grad is not None for _, p in self.parameters])
        for (_, p), is_used in zip(self.parameters, used, strict=True):
            if is_used and p not in self._under_way:  # other ranks have a gradient, or an earlier micro-batch had one
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                self.ready(p)
        with _lost_rank_is_reported():
            for p, (handle, context) in self._under_way.items():
                average = self._codec.decompress(self._hvd.synchronize(handle), context)
                if p.grad is not None and average is not p.grad:
                    p.grad.copy_(average)
        self._under_way.clear()


@contextlib.contextmanager
def _lost_rank_is_reported() -> Iterator[None]:
    """Raise Horovod's error as that of a broken collective: a rank is lost, and the others are told which."""
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except HorovodInternalError as error:
        raise RuntimeError(f"Connection closed: {str(error).split('. ')[0]}") from None


def _meet(hvd: Any, rank: int, ranks: int) -> None:
    """Initialize Horovod on the existing ranks, each as a host of its own."""
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0] or interface_facing("127.0.0.1") or "lo"
    store = dist.distributed_c10d._get_default_store()
    with _rendezvous(store, f"horovod/{next(_meetings)}") as port:
        places = {
            "RANK": rank,
            "SIZE": ranks,
            "CROSS_RANK": rank,
            "CROSS_SIZE": ranks,
            "LOCAL_RANK": 0,
            "LOCAL_SIZE": 1,
        }
        os.environ |= {f"HOROVOD_{name}": str(number) for name, number in places.items()}
        os.environ |= {
            "HOROVOD_HOSTNAME": f"rank{rank}",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": interface,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_LOG_LEVEL": "fatal",
        }
        hvd.init()


@contextlib.contextmanager
def _rendezvous(store: dist.Store, prefix: str) -> Iterator[int]:
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
