"""Which sequences share a row, so that little of it is padding: best fit, longest first.

Each sequence stays whole. The fullest row that still has room takes it; ties go to the row opened last. The result
depends on the lengths alone.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows as lists of indices into `lengths`, none longer together than `capacity`. Every length must fit."""
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # room left -> rows with that much
    rooms: list[int] = []  # the keys of open_rows, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not 0 < length <= capacity:
            raise ValueError(f"a sequence of {length} tokens does not fit into a row of {capacity}")
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left not in open_rows:
            insort(rooms, left)
            open_rows[left] = []
        open_rows[left].append(row)
    return rows
