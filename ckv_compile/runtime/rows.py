"""Where the rows of a cache went since something was made of them: beam search moves rows between two steps.

What is made of all rows of a cache (lists of edges, a partition that is under way) stays in the order that the rows had
then. It is put into the present order where it is used, so that moving rows costs nothing however much there is of it.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TypeVar

T = TypeVar("T")


def composed(earlier: list[int] | None, rows: list[int]) -> list[int] | None:
    """One map for two, None for a map that leaves every row where it is: row i was row ``rows[i]`` before."""
    both = list(rows) if earlier is None else [earlier[row] for row in rows]
    return None if both == list(range(len(both))) else both


@dataclasses.dataclass(eq=False)
class Origin:
    """The rows as they were at some moment: row i now is row ``rows[i]`` of then; None: all are where they were."""

    rows: list[int] | None = None

    def now(self, by_row: list[T]) -> list[T]:
        """What was made of every row then, by the rows of now."""
        return by_row if self.rows is None else [by_row[row] for row in self.rows]

    def fixed(self) -> Origin:
        """As it is now, whatever moves later."""
        return Origin(self.rows)


class Origins:
    """Follows the rows of one cache. For the thread that runs the model; others may hold and drop origins."""

    def __init__(self) -> None:
        self.now = Origin()
        self._followed = [weakref.ref(self.now)]

    def follow(self, origin: Origin) -> Origin:
        """A copy of another cache's origin, which follows the rows of this one from here on."""
        copied = origin.fixed()
        self._followed.append(weakref.ref(copied))
        return copied

    def move(self, rows: list[int]) -> None:
        """Row i of the cache is from here on what row ``rows[i]`` was."""
        living = [origin for reference in self._followed if (origin := reference()) is not None]
        for origin in living:
            origin.rows = composed(origin.rows, rows)
        self.now = Origin()
        self._followed = [weakref.ref(origin) for origin in (*living, self.now)]
