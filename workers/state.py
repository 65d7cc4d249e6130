"""A worker's copy of the running requests, kept in numbered rows and brought up to date by each plan's deltas."""

from __future__ import annotations

import numpy as np

from scheduler.plan import Extras, PlanMismatch, StepPlan, block_weight, row_weight, rows_checksum


class Rows:
    """Everything a step needs to know about its requests, as arrays indexed by row.

    tokens[row]: known token ids at admission, int64; decoded tokens stay on the device.
    computed: tokens whose keys and values are in the cache. block_table: [rows, blocks] int32 block ids.
    seeds uint64, temperature, top_p, min_p float64, top_k int64: how the row is sampled.
    extras: what few rows ask of sampling besides.
    decoding: rows of the decode part, in order.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.num_rows, self.max_blocks, self.block_size = num_rows, max_blocks, block_size
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Forgets every row."""
        count = self.num_rows
        self.epoch = epoch
        self.next_step = 0
        self.tokens: list[np.ndarray | None] = [None] * count
        self.computed = np.zeros(count, np.int64)
        self.block_table = np.zeros((count, self.max_blocks), np.int32)
        self.num_blocks = np.zeros(count, np.int64)
        self.block_sums = np.zeros(count, np.uint64)
        self.seeds = np.zeros(count, np.uint64)
        self.temperature = np.zeros(count)
        self.top_k = np.zeros(count, np.int64)
        self.top_p = np.ones(count)
        self.min_p = np.zeros(count)
        self.extras: list[Extras | None] = [None] * count
        self.decoding = np.empty(0, np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's deltas. Raises PlanMismatch when the rows are then not what the driver assumes."""
        if plan.epoch > self.epoch and plan.step == 0:
            self.begin_epoch(plan.epoch)
        if (plan.epoch, plan.step) != (self.epoch, self.next_step):
            raise PlanMismatch(
                f"got the plan of step {plan.step}, epoch {plan.epoch}, "
                f"but step {self.next_step}, epoch {self.epoch} comes next"
            )
        if plan.leave:
            self.decoding = self.decoding[~np.isin(self.decoding, plan.leave)]
        for admission in plan.admissions:
            row = admission.row
            self.tokens[row] = np.array(admission.tokens, np.int64)
            self.computed[row] = admission.computed
            self.num_blocks[row] = self.block_sums[row] = 0
            self.seeds[row] = admission.seed
            self.temperature[row] = admission.temperature
            self.extras[row] = admission.extras
            self.top_k[row], self.top_p[row], self.min_p[row] = admission.top_k, admission.top_p, admission.min_p
        for row, blocks in plan.new_blocks:
            self._append_blocks(row, blocks)
        if plan.join:
            self.decoding = np.append(self.decoding, plan.join)
        self._check(plan)

    def advance(self, plan: StepPlan) -> None:
        """Counts the step's tokens as computed."""
        for chunk in plan.chunks:
            self.computed[chunk.row] += chunk.length
        self.computed[self.decoding] += 1
        self.next_step += 1

    def _append_blocks(self, row: int, blocks: list[int]) -> None:
        start = int(self.num_blocks[row])
        stop = start + len(blocks)
        if stop > self.max_blocks:
            raise PlanMismatch(f"row {row} would hold {stop} blocks, but a request has {self.max_blocks} at most")
        self.block_table[row, start:stop] = blocks
        self.num_blocks[row] = stop
        self.block_sums[row] += np.uint64(sum(block_weight(i, block) for i, block in enumerate(blocks, start)))

    def _check(self, plan: StepPlan) -> None:
        rows = self.decoding
        weights = row_weight(rows.astype(np.uint64), self.computed[rows].astype(np.uint64), self.block_sums[rows])
        checksum = rows_checksum(int(weights.sum(dtype=np.uint64)))
        if len(rows) != plan.num_decodes or checksum != plan.checksum:
            raise PlanMismatch(
                f"step {plan.step} assumes {plan.num_decodes} decoding rows with checksum {plan.checksum:#x}, "
                f"this rank holds {len(rows)} with {checksum:#x}"
            )
        if len(rows) and np.any(self.computed[rows] >= self.num_blocks[rows] * self.block_size):
            raise PlanMismatch(f"step {plan.step} has a decoding row without a block for its next token")
        for chunk in plan.chunks:
            known, computed = self.tokens[chunk.row], int(self.computed[chunk.row])
            stop = chunk.start + chunk.length
            known_len = 0 if known is None else len(known)
            room = int(self.num_blocks[chunk.row]) * self.block_size
            if chunk.start != computed or stop > min(known_len, room):
                raise PlanMismatch(
                    f"step {plan.step} computes tokens {chunk.start} to {stop} of row {chunk.row}, which has "
                    f"{computed} computed of {known_len} and blocks for {room}"
                )
