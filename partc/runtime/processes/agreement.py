"""Agreements of all ranks outside of training steps, through their common store."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store


class Together:
    """Agreements of all ranks. Every rank must call each method, in the same order."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._calls = 0

    def broadcast(self, text: str) -> str:
        """The text of rank 0."""
        key = self._key()
        if self.rank == 0:
            self._store.set(key, _encodable(text))
        return self._store.get(key).decode()

    def first_problem(self, problem: str) -> str:
        """Wait until every rank has called; returns the first rank's problem, or '' if there is none."""
        key = self._key()
        if problem:
            self._store.compare_set(f"{key}/problem", "", _encodable(problem))
        if self._store.add(key, 1) == self.size:
            self._store.set(f"{key}/all", "")
        self._store.wait([f"{key}/all"])
        there = self._store.check([f"{key}/problem"])
        return self._store.get(f"{key}/problem").decode() if there else ""

    def claimed(self, thing: str) -> int:
        """The rank that claimed a thing first; ranks may call this in any order."""
        return int(self._store.compare_set(f"claimed/{thing}", "", str(self.rank)))

    def _key(self) -> str:
        self._calls += 1
        return f"together/{self._calls}"


def _encodable(text: str) -> str:
    """The text, with undecodable bytes of file names escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
