"""Hooks of autograd's nodes that keep no model alive."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def weakly(method: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> Callable[..., None]:
    """A hook for a parameter's node that calls the method with the parameter.

    Python's garbage collector cannot see torch's reference to a hook: one that referred to the method's object would
    keep it, and its model, forever.
    """
    weak = weakref.WeakMethod(method)

    def hook(*_: Any) -> None:
        if call := weak():
            call(parameter)

    return hook
