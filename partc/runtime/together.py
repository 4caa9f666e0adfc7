"""What all ranks agree on outside of training steps, through their common store."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store


class Together:
    """Each call is made by every rank, in the same order."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._calls = 0

    def told(self, text: str) -> str:
        """What rank 0 says."""
        key = self._key()
        if self.rank == 0:
            self._store.set(key, _encodable(text))
        return self._store.get(key).decode()

    def first(self, problem: str) -> str:
        """Once every rank has come: the first problem that any of them has; '' if there is none."""
        key = self._key()
        if problem:
            self._store.compare_set(f"{key}/problem", "", _encodable(problem))
        if self._store.add(key, 1) == self.size:
            self._store.set(f"{key}/all", "")
        self._store.wait([f"{key}/all"])
        there = self._store.check([f"{key}/problem"])
        return self._store.get(f"{key}/problem").decode() if there else ""

    def claimed(self, thing: str) -> int:
        """The rank that was first to say so of a thing; not in an order with others' calls."""
        return int(self._store.compare_set(f"claimed/{thing}", "", str(self.rank)))

    def _key(self) -> str:
        self._calls += 1
        return f"together/{self._calls}"


def _encodable(text: str) -> str:
    """Names of files may have bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
