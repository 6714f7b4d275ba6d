"""Sizes the memory that the models of a node can lend to each other, and the sequences that then fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from swiftkv.cache.division import SharedExtents
from swiftkv.cache.geometry import Extent, extent_between, sequence_blocks
from swiftkv.planning.models import ModelPlan, SizedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingPair:
    """A KV group of a worker that lends to a KV group of a master, in whole extents.

    `share` is the part of the lender's budget that this pair gets. All masters get the same part, and divide it among
    their groups by the bytes that a token takes in each.
    """

    lender: SizedPlan
    lender_group: int  # index into `lender.groups`; 0 stands for all groups if they share extents
    borrower: SizedPlan
    borrower_group: int
    share: Fraction
    extent: Extent  # the part in one rank's pool; a whole number of shared extents if the lender's groups share them
    num_extents: int

    @property
    def meu_w(self) -> int:
        """The lender group's blocks in an extent."""
        return self.extent.meu_w * self.lender.division.lendable()[self.lender_group]

    @property
    def max_extents(self) -> int:
        """The number of extents that this pair would get if the budget were the lender's whole pool."""
        return self.extent.count_within(self.lender.pool_bytes * self.share)

    @property
    def pool_extents(self) -> int:
        """The number of extents in the lender's group, whatever the budget: any of them may be lent."""
        return self.lender.group_blocks[self.lender_group] // self.meu_w

    @property
    def can_lend(self) -> bool:
        """Whether this lender could lend an extent to this borrower with some budget, now or later."""
        return self.lender.budget_bytes is not None and self.pool_extents > 0

    @property
    def lent_blocks(self) -> int:
        """The number of its own blocks that the lender lends to this borrower when its whole budget is lent."""
        return self.num_extents * self.meu_w

    @property
    def lent_bytes(self) -> int:
        """The bytes of `lent_blocks`, in the pools of all of the lender's ranks."""
        return self.lender.tensor_parallel_size * self.num_extents * self.extent.num_bytes

    @property
    def borrowed_blocks(self) -> int:
        """`K_i`: the borrower's blocks that the extents hold (Eq. 2, rounded down to extents)."""
        return self.num_extents * self.extent.meu_m

    @property
    def tokens_per_extent(self) -> int:
        """The borrower's tokens that one extent holds."""
        return self.extent.meu_m * self.borrower.block_size


@dataclass(frozen=True, slots=True)
class BorrowerRoom:
    """A borrower's pool as it is divided while it borrows from `pairs`, and the sequences that then fit.

    One stream buffer is assumed. The scheduler uses two where they fit, which does not shorten any context.
    """

    borrower: SizedPlan
    pairs: tuple[LendingPair, ...]

    def borrowed_blocks(self, group: int) -> int:
        """Return `K_i` of all lenders together."""
        return sum(pair.borrowed_blocks for pair in self.pairs if pair.borrower_group == group)

    def split(self, group: int) -> tuple[int, int]:
        """Return `(N_LSC, N_RC)` of one of the borrower's KV groups (Eqs. 4 and 5)."""
        borrower = self.borrower
        return borrower.division.split(borrower.group_blocks, self._borrowed)[group]

    @property
    def _borrowed(self) -> tuple[int, ...]:
        return tuple(self.borrowed_blocks(group) for group in range(len(self.borrower.groups)))

    @property
    def sequence_tokens(self) -> int:
        """The tokens of the longest sequence that the memory allows."""
        division = self.borrower.division
        if isinstance(division, SharedExtents):
            group_blocks = self.borrower.group_blocks
            if not division.bounds_sequences(group_blocks):
                return self.borrower.max_context_len
            return self.borrower.block_size * division.sequence_blocks(group_blocks, self._borrowed)
        bounding = [i for i in range(len(self.borrower.groups)) if self._bounds_sequences(i)]
        if not bounding:
            return self.borrower.max_context_len
        return self.borrower.block_size * min(sum(self.split(group)) for group in bounding)

    def _bounds_sequences(self, group: int) -> bool:
        """Return whether a group limits the length of a sequence.

        A window group does not if prompts are split and it has room for the window.
        """
        spec = self.borrower.groups[group]
        if spec.kind != "window" or not self.borrower.enable_chunked_prefill:
            return True
        return sum(self.split(group)) < spec.blocks_to_run(self.borrower.max_context_len)

    @property
    def longest_context(self) -> int:
        """The tokens of the longest sequence that memory and model allow."""
        return min(self.sequence_tokens, self.borrower.max_context_len)

    @property
    def cached_tokens(self) -> int:
        """The tokens of all sequences together. They are more than `sequence_tokens` if the LSC limits one sequence."""
        groups = range(len(self.borrower.groups))
        counts = [self.split(group)[1] + self.borrowed_blocks(group) for group in groups]
        return self.borrower.block_size * sequence_blocks(counts, self.borrower.groups)

    @property
    def lent_bytes(self) -> int:
        return sum(pair.lent_bytes for pair in self.pairs)

    def beside(self, *lenders: SizedPlan) -> BorrowerRoom:
        """Return the borrower's room if only these lenders lent to it."""
        return replace(self, pairs=tuple(pair for pair in self.pairs if pair.lender in lenders))

    def sequence_tokens_after(self, pair: LendingPair, extents: int) -> int | None:
        """Return the `sequence_tokens` if `pair` lent `extents` more, or fewer if negative; `None` if it cannot."""
        num_extents = pair.num_extents + extents
        if not 0 <= num_extents <= pair.max_extents:
            return None
        changed = replace(pair, num_extents=num_extents)
        return replace(self, pairs=tuple(changed if p is pair else p for p in self.pairs)).sequence_tokens


def plan_lending(plans: Sequence[ModelPlan]) -> tuple[BorrowerRoom, ...]:
    """Pair every master of a node with every worker in the same kind of memory, the host's or GPUs'.

    A worker with several ranks has pairs only with masters whose ranks can be divided evenly among them. A worker's
    budget is divided evenly among the masters. Pools of a size that is not known yet lend and borrow nothing.
    """
    planned = [plan for plan in plans if isinstance(plan, SizedPlan)]
    rooms = []
    for master in planned:
        beside = [plan for plan in planned if plan.on_gpu == master.on_gpu]
        num_ranks = master.tensor_parallel_size
        workers = [plan for plan in beside if plan.role == "worker" and num_ranks % plan.tensor_parallel_size == 0]
        if master.role == "master" and workers:
            num_masters = sum(plan.role == "master" for plan in beside)
            pairs = tuple(pair for worker in workers for pair in _pairs(worker, master, num_masters))
            rooms.append(BorrowerRoom(master, pairs))
    return tuple(rooms)


def lending_pairs(plans: Sequence[ModelPlan]) -> list[LendingPair]:
    """Return the pairs that any budget could use, in order of `plans`."""
    return [pair for room in plan_lending(plans) for pair in room.pairs if pair.can_lend]


def _pairs(lender: SizedPlan, borrower: SizedPlan, num_borrowers: int) -> list[LendingPair]:
    pairs = []
    lendable = lender.division.lendable()
    parts_per_block = borrower.tensor_parallel_size // lender.tensor_parallel_size  # borrower ranks per lender rank
    for i, num_blocks in lendable.items():
        for j, borrowed in enumerate(borrower.groups):
            extent = extent_between(num_blocks * lender.groups[i].block_bytes, parts_per_block * borrowed.block_bytes)
            share = _part(lender, i) * borrower.borrowing_parts[j] / num_borrowers
            pair = LendingPair(
                lender=lender,
                lender_group=i,
                borrower=borrower,
                borrower_group=j,
                share=share,
                extent=extent,
                num_extents=extent.count_within((lender.budget_bytes or 0) * share),
            )
            pairs.append(pair)
    return pairs


def _part(plan: SizedPlan, group: int) -> Fraction:
    """Return the part of a model's pool that one of its KV groups has."""
    return Fraction(plan.group_bytes[group], plan.pool_bytes)
