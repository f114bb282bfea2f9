"""The proof that an engine trains as one process does on the whole batch: cases, the ranks' work, the judgement.

Ranks hand in weights and losses. The right ones are computed in the grader's own process, by a plain loop without any
strategy, from the nonce of the trial.
"""
