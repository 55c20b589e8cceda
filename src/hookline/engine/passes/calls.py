"""The calls of a module that are under way, told without keeping their frames."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import final


@final
class Calls:
    """The calls of one module that are under way in a thread, outermost first.

    A call is told by the id of its frame. The frame itself would keep what its callers hold, the
    line included, where Ctrl-C has ended the call and no hook was told.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[int, CodeType, int | None]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, frame: FrameType, module: object = None) -> None:
        """A call begins; `module` is the `self` of its frame, if that has one."""
        self._calls.append((id(frame), frame.f_code, None if module is None else id(module)))

    def end(self, frame: FrameType) -> int:
        """A call has ended, and with it those inside it.

        Returns:
            How many; 0 if it never began.
        """
        calls = self._calls[:]  # another thread, as it ends the line, may clear them meanwhile
        if len(calls) == 1 and calls[0][0] == id(frame):  # mostly: the root seldom calls itself
            self._calls.clear()
            return 1
        keys = [key for key, _, _ in calls]
        n_ended = len(keys) - keys.index(id(frame)) if id(frame) in keys else 0
        del self._calls[len(keys) - n_ended :]
        return n_ended

    def drop_dead(self, frame: FrameType | None) -> int:
        """Forget the calls that are not on this thread's stack, seen from a frame.

        After a BaseException, such as Ctrl-C, torch tells no hook that a module has ended.

        Returns:
            How many were forgotten.
        """
        if not self._calls:
            return 0
        stack: dict[int, FrameType] = {}
        while frame is not None:
            stack[id(frame)] = frame
            frame = frame.f_back
        before = len(self._calls)
        while self._calls and not _is_under_way(self._calls[-1], stack):
            self._calls.pop()
        return before - len(self._calls)

    def clear(self) -> None:
        """Forget them all."""
        self._calls.clear()


def _is_under_way(call: tuple[int, CodeType, int | None], stack: dict[int, FrameType]) -> bool:
    key, code, owner = call
    frame = stack.get(key)
    if frame is None or frame.f_code is not code:
        return False  # a frame that came later may have the id of one that is gone
    return owner is None or id(frame.f_locals.get("self")) == owner


def call_frame(frame: FrameType) -> FrameType:
    """The frame of the call of a module, seen from the frame that calls its hooks.

    torch calls hooks from an inner function, and the always-called ones, after an exception, from
    the outer.
    """
    outer = frame.f_back
    return outer if outer is not None and frame.f_code.co_name == "inner" else frame
