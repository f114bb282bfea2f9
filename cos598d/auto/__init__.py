"""`--sync auto`: link and host are measured for some seconds, and the model of cost chooses an exact sync."""

from cos598d.auto.choice import Choice, choose

__all__ = ["Choice", "choose"]
