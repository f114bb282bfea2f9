"""Right gradient syncs that bear a wrong one's name: tests that go by what a sync is called, and not by what it does,
reject them."""

from cos598d.sync.base import GradientSync


def mended(wrong: type[GradientSync]) -> type[GradientSync]:
    """A class of the same name, module and ancestors, whose methods are again those that `wrong` has changed."""
    right = wrong.__mro__[1]
    restored = {name: getattr(right, name) for name, value in vars(wrong).items() if callable(value)}
    called = {name: getattr(wrong, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(wrong.__name__, (wrong,), restored | called)
