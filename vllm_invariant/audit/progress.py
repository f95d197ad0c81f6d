# In a vLLM branch: not needed (pytest shows progress).
"""A live line that says what is going on, and how far it has come."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console


class Bar:
    """A progress bar whose label says what is going on."""

    def __init__(self, bars: progress.Progress) -> None:
        self._bars = bars
        self._total = 0
        self._task = bars.add_task("", total=None)

    def say(self, text: str, steps: int = 0) -> None:
        """Change the label; ``steps`` more steps are to come."""
        self._total += steps
        self._bars.update(self._task, description=text, total=self._total or None)

    def catch_up(self) -> None:
        """All steps so far are done: an axis may have left some out."""
        self._bars.update(self._task, completed=self._total)

    def tick(self) -> None:
        """One step done."""
        self._bars.advance(self._task)


@contextmanager
def progress_bar(console: Console) -> Iterator[Bar]:
    """A bar for as long as the block runs."""
    columns = (
        progress.SpinnerColumn(),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=console) as bars:
        yield Bar(bars)
