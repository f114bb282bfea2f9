"""The bench: gradient syncs compared in the same processes, on the same batches, round by round."""
