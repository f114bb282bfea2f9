"""The cost model: what calls cost, what a run will take, and which sync is the fastest here."""
