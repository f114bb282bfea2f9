"""A cluster that exists for the duration of a block: whatever ends the block, nothing of the cluster stays."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from cos598d.errors import UserError
from cos598d.records.quantities import delay_words, rate_words
from cos598d.terminal.words import number_of
from cos598d.tools.cluster.hosts import start_switch
from cos598d.tools.cluster.network import Network
from cos598d.tools.cluster.plan import Cluster, address

OWN_SWITCH = (
    "this kernel has no netem: a program of ours carries the packets with that delay, and takes processor time for it"
)
ENDING = (signal.SIGTERM, signal.SIGHUP)


class ClusterStopped(UserError):
    """A signal has ended the programs in the cluster."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}.")
        self.exit_code = 128 + number


@contextlib.contextmanager
def live_cluster(cluster: Cluster, show: bool = False) -> Iterator[Cluster]:
    """Create the cluster, print that on standard error, and remove it with all programs in it when the block ends.

    SIGTERM and SIGHUP also end the block, as ClusterStopped. While hosts are removed, no signal interrupts that. Only a
    killed process leaves its hosts, for `cluster down`. Raises UserError if the cluster cannot be created.
    """
    network = Network(cluster, show)
    before = {number: signal.signal(number, _stop) for number in ENDING}
    try:
        network.build()
        try:
            switch = start_switch(network, stays=False)
            print(describe(cluster, bool(switch)), file=sys.stderr, flush=True)
            yield cluster
        finally:
            interrupt = signal.getsignal(signal.SIGINT)
            for number in (signal.SIGINT, *ENDING):
                signal.signal(number, signal.SIG_IGN)
            network.remove()
            signal.signal(signal.SIGINT, interrupt)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(cluster: Cluster, own_switch: bool) -> str:
    """One line about the cluster; `own_switch`: our own program carries its packets."""
    rate = "links without a limit" if cluster.rate is None else f"links of {rate_words(cluster.rate)} each way"
    delay = f", {delay_words(cluster.delay)} from host to host" if cluster.delay else ""
    first = f"cluster {cluster.name}: {number_of(cluster.hosts, 'host')}"
    addresses = f"{address(1)} to {address(cluster.hosts)}"
    return f"{first}, {addresses}, {rate}{delay}" + (f"; {OWN_SWITCH}" if own_switch else "")


def _stop(number: int, *_: Any) -> None:
    raise ClusterStopped(number)
