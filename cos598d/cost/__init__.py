"""What a run will cost, by formula, and which sync is the fastest here, by trying."""
