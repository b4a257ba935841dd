"""Look-ups by index."""

from __future__ import annotations

from torch import fx

from autopar.errors import RuleError
from autopar.program import call_arguments, place
from autopar.rules.notation import Rule, define
from autopar.rules.registry import algorithm, computed, from_text
from autopar.runtime.kernels.embedding import embedding_parts

_EMBEDDING = define("aten.embedding.default", "v d, ... -> ... d", args="w i", form="w", whole="v", saves="i")


@computed("aten.embedding.default")
def _embedding(node: fx.Node) -> Rule:
    """``v d, ... -> ... d``, linear in w; the vocabulary is split by an algorithm."""
    given = call_arguments(node)
    for option in ("scale_grad_by_freq", "sparse"):
        if given.get(option):
            raise RuleError(
                f"embedding with {option} has no rule",
                where=place(node),
                expected=f"{option}=False",
                got="True: " + ("gradients depend on the whole batch" if option[1] == "c" else "gradients are sparse"),
            )
    return from_text(node, _EMBEDDING)


algorithm("aten.embedding.default", "vocabulary", splits="v", run=embedding_parts, lacking="P")
