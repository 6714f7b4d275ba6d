"""The grammars of running requests, and the token masks that they make for each step.

Each request has a matcher of its own, which has consumed the request's tokens so far. Matchers make a step's masks
while the model computes: on the CPU at once, on a GPU as soon as the tokens of the step before are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from swiftkv._core import StepPlan
from swiftkv.arithmetic import ceil_div
from swiftkv.engine.grammar_compiler import Compiled, GrammarCompiler
from swiftkv.engine.grammar_tokens import open_tokenizer
from swiftkv.engine.mask_thread import MakeMasks, MaskThread, PendingMasks
from swiftkv.engine.messages import FINISH_RUNNING, EngineConfig
from swiftkv.engine.reasoning import ReasoningPlace
from swiftkv.engine.request import Request
from swiftkv.engine.token_masks import MASK_BITS, TokenMasks, forbid_unless_needed
from swiftkv.grammars import error_of, is_full

_TOKENS_PER_AUTOMATON = 64
"""The fewest tokens between two new automata for one answer, because making one may take as long as several steps."""
_MAX_THREADS = 8


@dataclass(slots=True, eq=False)
class _Held:
    """A request and its matcher.

    Attributes:
        compiled: The compiled grammar of which the first matcher is a copy.
        taken: The tokens that the matcher has consumed.
        failure: If the latest step could not make a mask: the number of consumed tokens before it, and the reason.
        alone_since: The number of consumed tokens when the matcher got an automaton of its own; `None`: it shares one.
    """

    request: Request
    matcher: LLMatcher
    compiled: Compiled
    reasoning: ReasoningPlace | None
    taken: list[int] = field(default_factory=list)
    failure: tuple[int, str] | None = None
    alone_since: int | None = None

    @property
    def min_position(self) -> int:
        """The first position at which the answer may end."""
        return len(self.request.prompt) + self.request.sampling.min_tokens


@dataclass(frozen=True, slots=True)
class _Rows:
    """Successive rows of one request. The first follows its last token, and each further row one more guess."""

    held: _Held
    first_row: int
    first_position: int
    draft: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return 1 + len(self.draft)

    @property
    def reasoning_begin(self) -> int | None:
        """The token that begins the reasoning, if the first row may have it."""
        reasoning = self.held.reasoning
        return reasoning.marks.begin if reasoning is not None and reasoning.may_begin else None

    def parted(self) -> tuple[list[int], _Rows | None]:
        """Split the rows: return those of reasoning, at which the answer must not end, and those under the grammar."""
        if self.held.reasoning is None or not self.held.reasoning.is_inside:
            return [], self
        reasoning, count = replace(self.held.reasoning), 1
        for token_id in self.draft:
            reasoning.take(token_id)
            if not reasoning.is_inside:
                break
            count += 1
        first, position = self.first_row + count, self.first_position + count
        inside = [] if reasoning.marks.is_last else [*range(self.first_row, first)]
        return inside, None if reasoning.is_inside else _Rows(self.held, first, position, self.draft[count:])


class Grammars:
    """The grammars of one engine's requests. All calls come from the thread of the step loop."""

    def __init__(
        self, config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int], *, wake: Callable[[], None]
    ) -> None:
        """`wake` is called, from another thread, when `take_compiled` has something."""
        self._eos_token_ids = list(eos_token_ids)
        self._num_words = ceil_div(vocab_size, MASK_BITS)
        tokenizer = open_tokenizer(Path(config.path), vocab_size, eos_token_ids)
        self._compiler = None if tokenizer is None else GrammarCompiler(tokenizer, wake)
        self._held: dict[int, _Held] = {}
        self._waiting: dict[int, Request] = {}  # for their grammars
        # On the CPU the model needs the cores.
        self._num_threads = 1 if config.device == "cpu" else min(config.threads, _MAX_THREADS)
        self._executor: LLExecutor | None = None
        self._thread = None if tokenizer is None else MaskThread()

    def __bool__(self) -> bool:
        """Return whether any request is held to a grammar."""
        return bool(self._held)

    def hold(self, request: Request) -> bool:
        """Hold `request` to its grammar from now on. Return whether it may run; if not, `take_compiled` returns it.

        Raises:
            ValueError: This engine supports no grammars.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return True
        if self._compiler is None:
            raise ValueError(
                "answers of this model cannot follow a grammar: it needs a tokenizer.json and an eos_token_id"
            )
        compiled = self._compiler.find(grammar)
        if compiled is None:
            self._waiting[request.request_id] = request
            return False
        marks = request.sampling.reasoning
        reasoning = None if marks is None else ReasoningPlace.of(marks)
        self._held[request.request_id] = _Held(request, compiled.matcher.deep_copy(), compiled, reasoning)
        return True

    def take_compiled(self) -> list[tuple[Request, str | None]]:
        """Return the requests whose grammars were compiled since the last call, each with the reason if that failed."""
        taken: list[tuple[Request, str | None]] = []
        for grammar, error in () if self._compiler is None else self._compiler.take_compiled():
            for request in [each for each in self._waiting.values() if each.sampling.grammar == grammar]:
                del self._waiting[request.request_id]
                if error is None:
                    is_held = self.hold(request)
                    assert is_held
                taken.append((request, None if error is None else str(error)))
        return taken

    def release(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self._held.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def masks_of(self, plan: StepPlan) -> PendingMasks | None:
        """Return the masks of a step, to be begun once the tokens before it are known; `None` if it needs none."""
        if not self._held:
            return None
        request_ids = plan.request_ids[plan.logits_seqs].tolist()
        if self._held.keys().isdisjoint(request_ids):
            return None

        def prepare() -> MakeMasks:
            parted = [rows.parted() for rows in self._rows_of(plan, request_ids)]
            endless = [row for inside, _ in parted for row in inside]
            return partial(self._masks, endless, [rows for _, rows in parted if rows is not None])

        assert self._thread is not None, "a request has a grammar that cannot be compiled"
        return PendingMasks(self._thread, prepare)

    def advance(
        self, request_ids: Sequence[int], token_ids: Sequence[int], finish_reasons: Sequence[int]
    ) -> dict[int, str]:
        """Give the matchers the new tokens of requests, in order. Return the requests that cannot go on, and why."""
        failed: dict[int, str] = {}
        for request_id, token_id, reason in zip(request_ids, token_ids, finish_reasons, strict=True):
            held = self._held.get(request_id)
            if held is None or request_id in failed:
                continue
            if held.reasoning is not None and held.reasoning.take(token_id):
                continue
            token_id = self._eos_token_ids[0] if token_id in self._eos_token_ids else token_id
            why = self._why_not(held, token_id, is_last=reason != FINISH_RUNNING)
            if why is not None:
                failed[request_id] = f"the grammar cannot be followed any further: {why}"
        return failed

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        if self._thread is not None:
            self._thread.close()

    def _why_not(self, held: _Held, token_id: int, *, is_last: bool) -> str | None:
        """Give a matcher the next token, unless it is the last. Return why the answer cannot go on, if it cannot."""
        if held.failure is not None and held.failure[0] == len(held.taken):
            return held.failure[1]  # the token means nothing: the failed mask allowed only the end of the answer
        if is_last:
            return None
        held.taken.append(token_id)
        if held.matcher.consume_token(token_id) or (self._move(held, held.matcher) and not held.matcher.is_error()):
            return None
        return error_of(held.matcher)

    def _move(self, held: _Held, failed: LLMatcher) -> bool:
        """Give a request an automaton of its own if the automaton of `failed`, its matcher or a copy of it, is full.

        The new automaton has only the states of this answer's tokens, so it has room. Its matcher consumes them here.
        Return whether there is a new automaton.
        """
        is_due = held.alone_since is None or len(held.taken) - held.alone_since >= _TOKENS_PER_AUTOMATON
        if not (is_due and is_full(failed)):
            return False
        assert self._compiler is not None, "a request has a grammar that cannot be compiled"
        matcher = self._compiler.alone(held.compiled)
        if matcher is None:
            return False
        matcher.consume_tokens(held.taken)
        held.matcher, held.alone_since = matcher, len(held.taken)
        return True

    def _rows_of(self, plan: StepPlan, request_ids: Sequence[int]) -> list[_Rows]:
        rows: list[_Rows] = []
        logits_rows = plan.logits_rows
        inputs, positions = (array[logits_rows].tolist() for array in (plan.token_ids, plan.positions))
        for row, request_id in enumerate(request_ids):
            held = self._held.get(request_id)
            if held is None:
                continue
            if rows and rows[-1].held is held:
                rows[-1].draft.append(inputs[row])
            else:
                rows.append(_Rows(held, row, 1 + positions[row]))
        return rows

    def _masks(self, endless: Sequence[int], rows: Sequence[_Rows]) -> TokenMasks | None:
        """Return the masks of `endless` rows, which forbid only end-of-sequence tokens, and of rows with grammars."""
        held = self._fill(rows) if rows else None
        if not endless:
            return held
        bits = np.full((len(endless), self._num_words), 0xFFFF_FFFF, np.uint32)
        for token_id in self._eos_token_ids:
            bits[:, token_id // MASK_BITS] &= ~(np.uint32(1) << np.uint32(token_id % MASK_BITS))
        free = TokenMasks(np.array(endless, np.int32), bits)
        return free if held is None else free.beside(held)

    def _fill(self, rows: Sequence[_Rows]) -> TokenMasks:
        """Make masks, mostly without the interpreter's lock."""
        row_ids = [each.first_row + offset for each in rows for offset in range(len(each))]
        # A row after a guess that the grammar forbids allows anything: it is not read.
        bits = np.full((len(row_ids), self._num_words), 0xFFFF_FFFF, np.uint32)
        target = (bits.ctypes.data, bits.strides[0], len(bits))
        begins = np.cumsum([0, *map(len, rows)]).tolist()
        alone = [(each.held.matcher, begin) for each, begin in zip(rows, begins, strict=False) if not each.draft]
        # Copies consume the guesses, because llguidance 1.9 fails to undo tokens that a grammar names, such as tags.
        drafted = [
            (each.held.matcher.deep_copy(), begin, each.draft)
            for each, begin in zip(rows, begins, strict=False)
            if each.draft
        ]
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        if self._num_threads == 1:  # the only thread of the executor would have to be woken
            address, row_bytes, _ = target
            for matcher, begin in alone:
                matcher.unsafe_compute_mask_ptr(address + begin * row_bytes, row_bytes)
        elif alone:
            self._executor.unsafe_compute_mask_ptr(alone, *target)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        copies = {begin: matcher for matcher, begin, _ in drafted}
        for each, begin in zip(rows, begins, strict=False):
            each.held.failure = None
            if (matcher := copies.get(begin, each.held.matcher)).is_error():
                self._refill(each, matcher, bits[begin : begin + len(each)])
        for _, begin, draft in drafted:
            self._allow_only_ends_after_ends(bits[begin + 1 :], draft)
        self._allow_every_end(bits)
        for each, begin in zip(rows, begins, strict=False):
            if (token_id := each.reasoning_begin) is not None:
                bits[begin, token_id // MASK_BITS] |= np.uint32(1) << np.uint32(token_id % MASK_BITS)
            for offset in range(len(each)):
                if each.first_position + offset < each.held.min_position:
                    forbid_unless_needed(bits[begin + offset], each.held.request.stop_token_ids)
        return TokenMasks(np.array(row_ids, np.int32), bits)

    def _refill(self, rows: _Rows, failed: LLMatcher, bits: npt.NDArray[np.uint32]) -> None:
        """Make the masks of a request again, after its matcher, or the copy that consumed its guesses, has failed.

        Args:
            bits: The masks of `rows`.
        """
        rows.held.failure = self._fill_one_by_one(rows, bits)
        if self._move(rows.held, failed):
            rows.held.failure = self._fill_one_by_one(rows, bits)

    def _fill_one_by_one(self, rows: _Rows, bits: npt.NDArray[np.uint32]) -> tuple[int, str] | None:
        """Make the masks of a request one by one.

        If one cannot be made, return the number of consumed tokens before it, and the reason.
        """
        matcher = rows.held.matcher.deep_copy()
        for offset, mask in enumerate(bits):
            if offset:
                guess = rows.draft[offset - 1]
                is_allowed = bits[offset - 1, guess // MASK_BITS] >> np.uint32(guess % MASK_BITS) & np.uint32(1)
                if not is_allowed or guess in self._eos_token_ids:
                    break  # the rest is not read, or made elsewhere
                matcher.consume_token(guess)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                return len(rows.held.taken) + offset, error_of(matcher)
        return None

    def _allow_only_ends_after_ends(self, bits: npt.NDArray[np.uint32], draft: Sequence[int]) -> None:
        """Allow only the end in rows after a guess that ends the sequence: before `min_tokens`, another end follows.

        Args:
            bits: The rows after the guesses of `draft`, and any that come behind them.
        """
        end = next((place for place, token_id in enumerate(draft) if token_id in self._eos_token_ids), len(draft))
        first = self._eos_token_ids[0]
        bits[end : len(draft)] = 0
        bits[end : len(draft), first // MASK_BITS] = np.uint32(1) << np.uint32(first % MASK_BITS)

    def _allow_every_end(self, bits: npt.NDArray[np.uint32]) -> None:
        """Allow every end-of-sequence token of the model in rows whose grammar allows the first."""
        first, *others = self._eos_token_ids
        may_end = (bits[:, first // MASK_BITS] >> np.uint32(first % MASK_BITS)) & np.uint32(1)
        for token_id in others:
            bits[:, token_id // MASK_BITS] |= may_end << np.uint32(token_id % MASK_BITS)
