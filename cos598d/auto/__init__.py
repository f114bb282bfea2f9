"""`--sync auto`: the link and the host are measured for some seconds at most, and the model of cost chooses an exact sync."""

from cos598d.auto.choice import Choice, choose

__all__ = ["Choice", "choose"]
