"""ZeRO stage 2: every rank keeps only the gradients of its n-th, too."""

import torch

from cos598d.errors import UserError
from cos598d.zero.unit import Unit
from cos598d.zero.zero1 import Zero1


class Zero2(Zero1):
    """Stage 2, the gradients sharded too (Rajbhandari et al., "ZeRO", SC 2020, section 5.2: P_os+g).

    As stage 1, except:
    1. Every backward is reduced, also inside `no_sync`. Rank r adds the average of part r to what it has, and a unit's
       whole gradients are freed.
    2. At backward's end the ranks compare whether they are inside `no_sync`. A rank that has another number of
       micro-batches is an error on all ranks.

    Cost with k micro-batches per step: every rank sends k (n-1)/n S of gradients and (n-1)/n S of weights. In every
    backward it sends a small all-reduce of 4 bytes per parameter, too. Memory: as stage 1, but S/n of gradients from
    backward to the step, and within backward the units that are on their way. Choose it if stage 1's gradients do not
    fit. Without accumulation it sends no more.
    """

    every_backward = True

    def average_part(self, unit: Unit) -> torch.Tensor:
        average, unit.gradients, unit.arriving = unit.arriving.sum(dim=0), None, None
        return average

    def agree(self, has: list[bool]) -> list[bool]:
        *users, inside = self.count([*has, not self.ends_step])
        if 0 < inside < self.ranks:
            raise UserError(
                f"{inside} of {self.ranks} ranks are inside no_sync, and the others end their step: the ranks have "
                "different numbers of micro-batches. Give every rank as many: every backward is reduced."
            )
        return [count > 0 for count in users]
