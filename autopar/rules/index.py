"""Look-ups by index."""

from autopar.rules.registry import algorithm, rule
from autopar.runtime.kernels.embedding import embedding_parts

rule("aten.embedding.default", "v d, ... -> ... d", args="w i", form="w", whole="v", saves="i")
algorithm("aten.embedding.default", "vocabulary", splits="v", run=embedding_parts, lacking="P")
