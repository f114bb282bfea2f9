"""Pictures in time of what ranks really did: lanes with who waited for whom, and a collective step by step.

    picture = draw(own, reference)          # events of `cos598d.tools.learn.events`
    picture.text(width, letters), picture.svg()

`cos598d picture` makes them of a small run of its own, or of a run's record.
"""

from cos598d.tools.learn.picture.draw import Picture, draw

__all__ = ["Picture", "draw"]
