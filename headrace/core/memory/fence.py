"""The fence: blocks of ended or preempted sequences that a step in flight may still write to.

If they were freed at once, another sequence could get them and a stale row could overwrite them. So each table waits
for the commit of the last step that had a row of its sequence. The fence knows steps and block ids, nothing else.
"""

from __future__ import annotations


class Fence:
    """Tables with the step whose commit frees them; ``num_blocks`` counts references, not distinct blocks."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, list[int]]] = []
        self.num_blocks = 0

    def hold(self, table: list[int], until_step: int) -> None:
        """Hold a table's references until ``until_step`` has been committed."""
        self.tables.append((until_step, table))
        self.num_blocks += len(table)

    def lift(self, committed: int) -> list[list[int]]:
        """Remove and return the tables that the commit of this step frees, oldest first."""
        lifted = [table for step, table in self.tables if step <= committed]
        if lifted:
            self.tables = [entry for entry in self.tables if entry[0] > committed]
            self.num_blocks -= sum(map(len, lifted))
        return lifted
