"""Errors as a user reads them: what, where, expected against got, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autopar.errors import AutoparError


@contextmanager
def refused(kind: type[AutoparError], *parts: str) -> Iterator[None]:
    """The block raises ``kind``, and the printed error contains every one of ``parts``."""
    with pytest.raises(kind) as caught:
        yield
    text = " ".join(str(caught.value).split())
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
