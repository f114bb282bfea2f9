"""Communication between ranks: collectives and messages; each call is entered in the ledger."""
