"""Code that is not ours, run on real ranks: what came out, and in one sentence with its line what is wrong."""
