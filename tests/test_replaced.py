"""Attributes that contexts replace."""

from __future__ import annotations

import pytest

from partc.replaced import all_replaced, replaced


class Base:
    kept = 1

    @classmethod
    def named(cls) -> str:
        return cls.__name__


class Derived(Base):
    own = 2

    @staticmethod
    def plain() -> int:
        return 3


def test_owners_have_their_attributes_again() -> None:
    before = dict(vars(Derived))
    with pytest.raises(ZeroDivisionError), replaced(Derived, own=5, kept=6, plain=lambda: 7, new=8):
        assert (Derived.own, Derived.kept, Derived.plain(), vars(Derived)["new"]) == (5, 6, 7, 8)
        raise ZeroDivisionError
    assert dict(vars(Derived)) == before and Derived.kept == 1


def test_the_same_attribute_of_several_owners() -> None:
    with all_replaced([(Base, "kept", 4), (Derived, "kept", 5), (Base, "kept", 6)]):
        assert (Base.kept, Derived.kept) == (6, 5)
    assert (Base.kept, Derived.kept) == (1, 1) and "kept" not in vars(Derived)
