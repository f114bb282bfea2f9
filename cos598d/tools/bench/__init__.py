"""The bench: gradient syncs side by side in the same processes, on the same batches, round by round."""
