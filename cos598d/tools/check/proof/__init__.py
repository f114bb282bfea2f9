"""The proof that an engine trains as one process does on the whole batch: cases, what ranks do for them, the judgement.

Ranks hand in weights and losses. What is right is computed in the grader's own process, by a plain loop that knows no
strategy, from the nonce of the trial.
"""
