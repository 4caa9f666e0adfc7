"""Prefetching: while the device computes a step, a thread prepares this rank's part of the next batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Part = Mapping[str, Tensor]


class Feed:
    """This rank's parts of batches, by number; up to `ahead` of them are prepared in advance.

    Parts are prepared one at a time, in order, and are the same as without a thread. With `pin` they are in page-locked
    memory, from which copies to the device do not block the host.
    """

    def __init__(self, make: Callable[[int], Part], *, end: int, ahead: int, pin: bool) -> None:
        self._make, self._end, self._ahead, self._pin = make, end, ahead, pin
        self._coming: deque[_Coming] = deque()

    def __call__(self, number: int) -> Part:
        """The part of one batch. Raises the error of its preparation, if there was one."""
        if not self._ahead:
            return self._make(number)
        if not self._coming or self._coming[0].number != number:
            self._coming = deque([_Coming(number, self._prepare, None)])
        coming = self._coming.popleft()
        part = coming.result()
        last = self._coming[-1] if self._coming else coming
        while len(self._coming) < self._ahead and last.number + 1 < self._end:
            last = _Coming(last.number + 1, self._prepare, last)
            self._coming.append(last)
        return part

    def _prepare(self, number: int) -> Part:
        part = self._make(number)
        return {name: x.pin_memory() for name, x in part.items()} if self._pin else part


class _Coming:
    """A batch that a thread prepares after the previous one."""

    def __init__(self, number: int, make: Callable[[int], Part], before: _Coming | None) -> None:
        self.number = number
        self._make, self._before = make, before
        self._part: Part | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"batch {number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        try:
            with torch.no_grad():
                self._part = self._make(self.number)
        except BaseException as error:
            self._error = error

    def result(self) -> Part:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._part is not None
        return self._part
