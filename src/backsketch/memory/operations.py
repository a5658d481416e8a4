"""Which operation saved what, read from the graph once it is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..torch_private import saved_by
from .saved_tensor_meter import Held


def operations_behind(loss: Tensor) -> dict[Held, str]:
    """Return, for all that the meter saw saved for backward of ``loss``, the operation that saved it; see ``Claim``.

    Before torch 2.8, which does not show what nodes hold, it is empty.
    """
    return {
        saved: re.sub(r"Backward\d*$", "", node.name())
        for node in _nodes(loss.grad_fn)
        for saved in saved_by(node)
        if isinstance(saved, Held)
    }


def _nodes(root: Any) -> Iterator[Any]:
    found, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - found
        found |= new
        waiting.extend(new)
