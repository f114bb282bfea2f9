"""What travels between ranks: collectives and messages, each call entered in the ledger."""

from cos598d.comm.communicator import Communicator

__all__ = ["Communicator"]
