"""Where a node of an emitted graph lies, in the words of the user's model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from autopar.program import place
from autopar.rules.analysis import Operation


def whereabouts(node: fx.Node, ops: Mapping[str, Operation]) -> str:
    """Module path and source line: of the op that the node is, else of those that it lies between."""
    if node.name in ops:
        return f"{node.name}, {place(ops[node.name].node)}"
    before = _nearest(node, lambda n: n.all_input_nodes, lambda n: n.name in ops)
    after = _nearest(node, lambda n: list(n.users), lambda n: bool(n.meta.get("where")))
    text = [node.name]
    if after is not None:
        text.append(f"in or before {after.meta['where']}")
    if before is not None:
        text.append(f"after {before.name} of {place(ops[before.name].node)}")
    return ", ".join(text)


def _nearest(
    node: fx.Node, beside: Callable[[fx.Node], Sequence[fx.Node]], wanted: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """The first node, by distance from ``node``, that is wanted."""
    queue, seen = deque([node]), {node}
    while queue:
        known = queue.popleft()
        if wanted(known):
            return known
        new = [n for n in beside(known) if n not in seen]
        queue.extend(new)
        seen.update(new)
    return None
