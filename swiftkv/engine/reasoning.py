"""The place of a request before, within or after its reasoning."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftkv.engine.messages import ReasoningMarks


@dataclass(slots=True)
class ReasoningPlace:
    """A request's place in its reasoning."""

    marks: ReasoningMarks
    is_inside: bool
    may_begin: bool  # with the next token
    recent: list[int] = field(default_factory=list)  # the latest tokens, at most as many as `marks.end` has

    @classmethod
    def of(cls, marks: ReasoningMarks) -> ReasoningPlace:
        return cls(marks, is_inside=marks.begin is None, may_begin=marks.begin is not None)

    def take(self, token_id: int) -> bool:
        """Take the next token. Return whether it belongs to the reasoning or its marks."""
        if self.may_begin:
            self.may_begin = False
            self.is_inside = token_id == self.marks.begin
            return self.is_inside
        if not self.is_inside:
            return False
        self.recent = [*self.recent, token_id][-len(self.marks.end) :]
        self.is_inside = self.recent != self.marks.end
        return True

    @property
    def next_of_end(self) -> int:
        """The next token of `marks.end` that the answer lacks: it must come next for the reasoning to end."""
        end = self.marks.end
        done = next(n for n in range(len(end) - 1, -1, -1) if self.recent[len(self.recent) - n :] == end[:n])
        return end[done]
