"""Seconds and bytes as people read them."""

from __future__ import annotations

import math


def format_seconds(seconds: float) -> str:
    """``412 ms``, ``3.1 ms``, ``86 us``."""
    unit, factor = time_unit(seconds)
    return f"{digits(seconds * factor)} {unit}"


def format_bytes(count: float) -> str:
    """``96 MiB``, ``1.5 GiB``, ``12 B``."""
    unit, factor = byte_unit(count)
    return f"{digits(count / factor)} {unit}"


def digits(value: float, beside: float = 0.0) -> str:
    """Three digits without an exponent; as many decimals as the larger number ``beside`` it has."""
    largest = max(abs(value), abs(beside))
    decimals = 0 if largest >= 99.95 else 1 if largest >= 9.995 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def time_unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 or not seconds else ("us", 1e6)


def byte_unit(count: float) -> tuple[str, float]:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(count)) // 10, len(units) - 1) if count >= 1 else 0
    return units[power], 1024.0**power
