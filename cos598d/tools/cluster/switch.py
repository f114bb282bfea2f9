"""A switch in user space, for kernels that cannot delay packets: python -m cos598d.tools.cluster.switch SECONDS PORT...

1. It listens to a packet socket on every port, in the switch's namespace, and learns which addresses are reached
   through it.
2. A frame that arrives waits for the delay in a queue; all wait equally long, so the queue stays in order.
3. Then it is sent from the port of its receiver, or from all others if that is not known yet.

Packets that the kernel has not cut yet stay whole, with the virtio header that describes how to cut them. So the rates
and counters of the links stay the kernel's. Carrying them costs CPU time here, which netem would not.
"""

import contextlib
import select
import socket
import sys
import time
from collections import deque

# From linux/if_packet.h and asm-generic/socket.h; Python has no names for them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 0x0003
VIRTIO_HEADER_BYTES = 10
LARGEST_FRAME = VIRTIO_HEADER_BYTES + 14 + 65_536
BUFFER_BYTES = 64 << 20
READY = "ready"


def open_port(name: str) -> socket.socket:
    """A socket that receives what arrives at a port and sends from it; each frame has a virtio header before it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def serve(ports: list[socket.socket], delay: float) -> None:
    """Carry frames between `ports`, each `delay` seconds after its arrival, until the process is ended."""
    homes: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, bytes, socket.socket]] = deque()
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        # Its timeout counts microseconds; epoll's counts milliseconds.
        for port in select.select(ports, [], [], rest)[0]:
            with contextlib.suppress(BlockingIOError, OSError):  # a disconnected port has no data
                frame = port.recv(LARGEST_FRAME)
                homes[frame[VIRTIO_HEADER_BYTES + 6 : VIRTIO_HEADER_BYTES + 12]] = port
                waiting.append((time.monotonic() + delay, frame, port))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, frame, origin = waiting.popleft()
            home = homes.get(frame[VIRTIO_HEADER_BYTES : VIRTIO_HEADER_BYTES + 6])
            for port in ports if home is None else (home,):
                if port is not origin:
                    with contextlib.suppress(OSError):  # the link's queue is full, or disconnected: the packet is lost
                        port.send(frame)


def main() -> None:
    """Open the ports named on the command line, report that, and serve."""
    delay, names = float(sys.argv[1]), sys.argv[2:]
    ports = [open_port(name) for name in names]
    print(READY, flush=True)
    serve(ports, delay)


if __name__ == "__main__":
    main()
