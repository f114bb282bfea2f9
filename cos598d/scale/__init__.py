"""A model of cost, fitted to the bench's records: seconds an iteration at other rates, delays, batches and hosts."""
