"""What communication costs.

Bytes are those of ``formulas.md``: per rank, in a group of n, N the bytes of the value on one rank with this axis
undone.

| kind                       | sent per rank   | steps        |
|----------------------------|-----------------|--------------|
| all-gather, reduce-scatter | (n-1)/n N       | ceil(log2 n) |
| all-reduce                 | 2 (n-1)/n N     | 2 ceil(log2 n) |
| all-to-all                 | (n-1)/n N/n     | ceil(log2 n) |
| permute                    | N/n             | 1            |
| local                      | 0               | 0            |

Time is steps times latency plus bytes over bandwidth.  The bytes are the least that any algorithm sends, and a ring
sends exactly these.  The steps are the least that any algorithm needs with these bytes (recursive doubling and halving;
Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521).  A plain ring takes n-1, but libraries leave the ring
where latency counts: NCCL takes trees for small all-reduces and its logarithmic PAT algorithm across nodes.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from autopar.cost_model.hardware import Link

Kind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "local"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def sent_bytes(kind: Kind, nbytes: float, n: int) -> float:
    """Bytes that each rank of a group of ``n`` sends.

    ``nbytes`` is the size of the value on one rank with this axis undone: of all-gather's output, of reduce-scatter's
    and all-reduce's input, of n times an all-to-all's or a permute's input.  Shards are counted as equal.

    Raises ValueError for an unknown kind or n < 1.
    """
    _check(kind, n)
    if n == 1 or kind == "local":
        return 0.0
    if kind == "permute":
        return nbytes / n
    part = (n - 1) / n * nbytes
    return {"all-gather": part, "reduce-scatter": part, "all-reduce": 2 * part, "all-to-all": part / n}[kind]


def steps(kind: Kind, n: int) -> int:
    """Messages that follow one another, each of which costs the link's latency.  Raises as ``sent_bytes`` does."""
    _check(kind, n)
    if n == 1 or kind == "local":
        return 0
    if kind == "permute":
        return 1
    depth = (n - 1).bit_length()
    return 2 * depth if kind == "all-reduce" else depth


def seconds(kind: Kind, nbytes: float, n: int, link: Link) -> float:
    """Seconds of one collective over ``link``; arguments as in ``sent_bytes``, which also says what is raised."""
    sent = sent_bytes(kind, nbytes, n)
    time = steps(kind, n) * link.latency
    # a link without bandwidth limit is allowed, so that latency can be studied alone
    return time + (sent / link.attained(kind) if sent and not math.isinf(link.attained(kind)) else 0.0)


def _check(kind: str, n: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of collective: expected one of {', '.join(KINDS)}")
    if n < 1:
        raise ValueError(f"a group has at least one rank, got {n}")
