"""The decoding set: the rows that compute one token each step, kept as the workers hold it.

In steady decode the next plan differs from the last by arithmetic only: every sum over the rows is kept up to date as
rows join, grow and leave, and no row is looked at for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.plan import StepPlan, block_weight, row_weight, rows_checksum
from scheduler.request import Request


class DecodingSet:
    """requests: by row, in order of joining. context: the sum of their computed tokens."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.context = 0
        self._last: list[Request] = []  # the decodes of the last plan, in the order of `running`
        self._left: list[int] = []  # rows given up since the last plan
        self._block_sums: dict[int, int] = {}  # of every row in use
        self._weights = 0
        self._row_sum = 0  # of the rows' numbers, each plus one

    def __len__(self) -> int:
        return len(self.requests)

    def open_row(self, row: int) -> None:
        """The row is given to a request, which has no blocks yet."""
        self._block_sums[row] = 0

    def close_row(self, request: Request) -> None:
        """The request gives its row up."""
        if request.row in self.requests:
            self._leave(request.row)
        del self._block_sums[request.row]

    def blocks_added(self, request: Request, blocks: Iterable[int]) -> None:
        """Blocks are about to be appended to the request's block table."""
        added = sum(block_weight(index, block) for index, block in enumerate(blocks, start=len(request.blocks)))
        self._block_sums[request.row] += added
        if request.row in self.requests:
            self._weights += row_weight(request.row, 0, added)

    def put_into(self, plan: StepPlan, decodes: list[Request]) -> None:
        """Makes `decodes` the set, and the plan say what changed and what the workers must then hold."""
        if decodes != self._last or self._left:
            rows = {request.row for request in decodes}
            for row in [row for row in self.requests if row not in rows]:
                self._leave(row)
            plan.leave, self._left = self._left, []
            for request in decodes:
                if request.row not in self.requests:
                    self._join(request)
                    plan.join.append(request.row)
            self._last = decodes
        plan.num_decodes = len(self.requests)
        plan.checksum = rows_checksum(self._weights)

    def advance(self) -> None:
        """The plan is out: every row's computed tokens grow by one. The caller counts them in the requests."""
        self._weights += self._row_sum * row_weight(0, 1, 0)
        self.context += len(self.requests)

    def _join(self, request: Request) -> None:
        row = request.row
        self.requests[row] = request
        self._weights += row_weight(row, request.scheduled, self._block_sums[row])
        self._row_sum += row + 1
        self.context += request.scheduled

    def _leave(self, row: int) -> None:
        request = self.requests.pop(row)
        self._weights -= row_weight(row, request.scheduled, self._block_sums[row])
        self._row_sum -= row + 1
        self.context -= request.scheduled
        self._left.append(row)
