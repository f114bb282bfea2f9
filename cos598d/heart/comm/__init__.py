"""What travels: the ledger, the dispatcher, gloo, the group."""
