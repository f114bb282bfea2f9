"""The cost model: what calls cost, what a run will cost, and which sync is the fastest here."""
