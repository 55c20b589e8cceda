"""The running calls of a module, identified without keeping their frames."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import final

from hookline.util.walk_stack import walk_stack


@final
class RunningCalls(list[tuple[int, CodeType, int | None]]):
    """The running calls of one module in a thread, outermost first.

    A call is identified by the id of its frame. The frame itself would keep its callers' locals
    alive, the line included, when Ctrl-C has ended the call and torch has called no hook.
    """

    __slots__ = ()

    def begin(self, frame: FrameType, module: object = None) -> None:
        """Add a call that begins.

        Args:
            frame: the frame of the call.
            module: the `self` of the frame, if the frame has one.
        """
        self.append((id(frame), frame.f_code, None if module is None else id(module)))

    def end(self, frame: FrameType) -> int:
        """Remove a call that has ended, and the calls inside it.

        Returns:
            The number of calls removed; 0 if the call was never added.
        """
        calls = self[:]  # another thread that ends the line may clear the list meanwhile
        # The common case: the root seldom calls itself.
        if len(calls) == 1 and calls[0][0] == id(frame):
            self.clear()
            return 1
        keys = [key for key, _, _ in calls]
        n_ended = len(keys) - keys.index(id(frame)) if id(frame) in keys else 0
        del self[len(keys) - n_ended :]
        return n_ended

    def drop_ended(self, frame: FrameType | None) -> int:
        """Remove the calls that are no longer on this thread's stack.

        After a BaseException such as Ctrl-C, torch calls no hook at the end of a module.

        Args:
            frame: the frame from which the stack is walked.

        Returns:
            The number of calls removed.
        """
        if not self:
            return 0
        stack = {id(each): each for each in walk_stack(frame)}
        before = len(self)
        while self and not _is_under_way(self[-1], stack):
            self.pop()
        return before - len(self)


def _is_under_way(call: tuple[int, CodeType, int | None], stack: dict[int, FrameType]) -> bool:
    key, code, owner = call
    frame = stack.get(key)
    if frame is None or frame.f_code is not code:
        return False  # a later frame may have the id of a freed frame
    return owner is None or id(frame.f_locals.get("self")) == owner
