"""What the compiler does now, on a terminal: one line that changes and goes when the work is done."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_line(console: Console | None = None) -> Iterator[Callable[[str], None] | None]:
    """``plan(..., progress=)`` for a person who watches: None on ranks other than 0, and without a terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("start", total=None)
        yield lambda text: bar.update(task, description=text)
