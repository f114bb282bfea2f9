"""What is sent between ranks: collectives and messages, each call entered in the ledger."""
