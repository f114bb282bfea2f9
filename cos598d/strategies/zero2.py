"""ZeRO stage 2: every rank keeps the gradients too of its n-th of the weights alone."""

from cos598d.strategies.zero1 import Zero1


class Zero2(Zero1):
    """Optimizer state and gradients sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.2: P_os+g).

    1. Buckets as `zero1` has them. The gradients that backward computes go into a flat tensor from a small pool, or
       make one themselves where a bucket is one large parameter.
    2. When a bucket's last gradient is there its reduce-scatter starts, as in `zero1`, while backward goes on. As soon
       as rank r has the sum of part r, it lets go of all the rest: the flat tensor serves the next bucket.
    3. Norm, step and all-gather of the weights: as in `zero1`.
    With gradient accumulation every micro-batch's gradients are reduced, and the parts are added up: else the rest
    would have to be kept. So the ranks make the same number of passes, though one of them may have no example for it.

    Cost for weights of S bytes and a micro-batches a step: every rank sends and receives a (n-1)/n S of gradients and
    (n-1)/n S of weights: 2(n-1)/n S without accumulation. Memory: S of weights, with AdamW 2S/n of state, from
    backward to the step S/n of gradients, and the pool: the bucket that fills, and those with one of the last four
    segments that were started. Next to them up to 8(n-1) MiB of scratch, and within a step the largest gradient
    (`held_by_shards`). Choose it over `zero1` where gradients do not fit and one micro-batch makes a step.
    """

    keeps_gradients = False
    equal_passes = True
    shards = ("optimizer", "gradients")
