"""Horovod: averages gradients tensor by tensor, fused, in a thread of its own."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import nn

from cos598d.engines import need
from cos598d.errors import UsageError
from cos598d.records.conventions import BY_COUNTERS
from cos598d.sync.base import GradientSync
from cos598d.world.network import INTERFACE_VARIABLE


class Horovod(GradientSync):
    """Horovod's all-reduce (Sergeev and Del Balso, "Horovod", 2018), on its own gloo.

    1. When backward has computed a gradient, it is passed by name to Horovod's thread, while backward still runs.
    2. Every millisecond the threads report to rank 0 which tensors they have. Those that all ranks have are packed, up
       to 128 MiB, and averaged by a ring all-reduce. So ranks may produce them in different orders.
    3. The end of backward waits for all of them. Then every rank clips the averages and makes the same step.

    Cost for a gradient of S bytes: every rank sends and receives 2(n-1)/n S. The threads add 0.1 MB per second. The
    ledger sees none of it: the bytes are those that the kernel counts. Memory: as `all_reduce`, and the thread's buffer
    of up to 128 MiB. Choose it if you already use it. Its last version is from 2023, and does not compile with a new
    torch without the patches of `make engines`.

    Known wrong: between hosts it connects to the address of the host's name, whatever interface it is given. bfloat16
    is refused. Which tensors are packed together depends on timing, and so does the order of sums: on three ranks or
    more, no run or resume reproduces another to the last bit.
    """

    bytes_from = BY_COUNTERS

    @classmethod
    def check_run(cls, ranks: int, precision: str) -> None:
        need("horovod", "Horovod", "horovod")

    def attach(self, model: nn.Module) -> Callable:
        call = super().attach(model)
        if self.device.type != "cpu":
            raise UsageError("Horovod is built without CUDA here. Add --no_cuda, or choose another --sync.")
        import horovod.torch as hvd

        if not hvd.is_initialized():
            os.environ |= _place(self)
            hvd.init()
        self._hvd, self._names = hvd, {p: name for name, p in self.parameters}
        self._under_way: dict[nn.Parameter, int] = {}
        return call

    def ready(self, parameter: Any) -> None:
        name, parameter.grad = self._names[parameter], parameter.grad.to_dense()
        self._under_way[parameter] = self._hvd.allreduce_async_(parameter.grad, name=name, op=self._hvd.Average)

    def finish(self) -> None:
        used = self.agree([p in self._under_way or p.grad is not None for _, p in self.parameters])
        for (_, p), is_used in zip(self.parameters, used, strict=True):
            if is_used and p not in self._under_way:  # other ranks have a gradient, or an earlier micro-batch had one
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                self.ready(p)
        while self._under_way:
            self._hvd.synchronize(self._under_way.popitem()[1])


def _place(sync: GradientSync) -> dict[str, str]:
    """How Horovod finds the ranks, each as a host of its own. They meet at its own server, on rank 0."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    interface = os.environ.get(INTERFACE_VARIABLE, "lo").split(",")[0]
    rank, ranks, place = sync.rank, sync.ranks, None
    if rank == 0:
        address = next(each.address for each in psutil.net_if_addrs()[interface] if each.family == socket.AF_INET)
        server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
        server.init([SlotInfo(f"rank{each}", each, 0, each, ranks, 1, ranks) for each in range(ranks)])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = server.server_address
    address, port = sync.exchange(place)[0]
    words = f"RANK={rank} SIZE={ranks} LOCAL_RANK=0 LOCAL_SIZE=1 CROSS_RANK={rank} CROSS_SIZE={ranks} "
    words += f"HOSTNAME=rank{rank} CONTROLLER=gloo CPU_OPERATIONS=gloo GLOO_IFACE={interface} LOG_LEVEL=fatal "
    words += f"GLOO_RENDEZVOUS_ADDR={address} GLOO_RENDEZVOUS_PORT={port}"
    return {f"HOROVOD_{name}": value for name, _, value in (word.partition("=") for word in words.split())}
