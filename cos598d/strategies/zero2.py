"""ZeRO stage 2: every rank keeps only the gradients of its n-th of the weights, as well as their optimizer state."""

from cos598d.strategies.zero1 import Zero1


class Zero2(Zero1):
    """Optimizer state and gradients sharded (Rajbhandari et al., "ZeRO", SC 2020, section 5.2: P_os+g).

    1. Buckets are as in `zero1`. Backward's gradients go into a flat tensor from a small pool. If a bucket is one large
       parameter, its gradient is the flat tensor.
    2. When a bucket's last gradient is ready, its reduce-scatter starts, as in `zero1`, while backward continues. As
       soon as rank r has the sum of part r, it frees the rest: the flat tensor serves the next bucket.
    3. Norm, step and all-gather of the weights are as in `zero1`.
    With gradient accumulation, every micro-batch's gradients are reduced, and the parts are added up; otherwise the
    rest would have to be kept. So all ranks make the same number of passes, even a rank without an example for one.

    Cost for weights of S bytes and a micro-batches per step: every rank sends and receives a (n-1)/n S of gradients and
    (n-1)/n S of weights: 2(n-1)/n S without accumulation. Memory: S of weights, with AdamW 2S/n of state, S/n of
    gradients from backward to the step, and the pool: the bucket being filled, and those of the last four segments that
    were started. In addition up to 8(n-1) MiB of scratch, and within a step the largest gradient (`held_by_shards`).
    Choose it over `zero1` if gradients do not fit and one micro-batch makes a step.
    """

    keeps_gradients = False
    shards = ("optimizer", "gradients")
