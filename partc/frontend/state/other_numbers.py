"""Other random numbers of Python and NumPy, for traces that are compared with the first one.

A branch may depend on numbers near an end of their range (`random.random() < 0.1`), which few seeds draw. Two traces
therefore draw the least and the largest numbers first: the Mersenne Twister (Matsumoto and Nishimura 1998) returns the
words of its state one after the other, each as a fixed function of its bits. Of NumPy's other generators, the first
number is the least or the largest of many seeds.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from partc.runtime.train.data import seeded_outside_torch

TRIES = 7  # traces with other numbers
_EXTREMES = (0, 0x12DD9BB3)  # words for which a generator returns 32 bits of zeros, and of ones
_COUNT = 64  # words that are extreme; functions that reject numbers draw others behind them
_SEEDS = 1000


@contextmanager
def other_numbers(attempt: int, generators: Iterable[Any]) -> Iterator[list[Any]]:
    """A context in which Python, NumPy and these generators of theirs draw other numbers in each of `TRIES` attempts,
    counted from 1. Behind it, the list has the generators from which numbers were drawn.
    """
    held = [(generator, _state(generator)) for generator in generators]
    with seeded_outside_torch(attempt):
        numpy: Any = sys.modules.get("numpy")
        drawing = [random, *([numpy.random] if numpy else []), *(generator for generator, _ in held)]
        for generator in drawing if attempt <= len(_EXTREMES) else ():
            _begin_with(generator, _EXTREMES[attempt - 1])
        begun = [pickle.dumps(_state(generator)) for generator, _ in held]
        drawn: list[Any] = []
        try:
            yield drawn
        finally:
            for (generator, state), before in zip(held, begun, strict=True):
                if pickle.dumps(_state(generator)) != before:
                    drawn.append(generator)
                _set_state(generator, state)


def is_generator(value: Any) -> bool:
    """Whether an object is a generator of Python or NumPy with a state."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    twister = isinstance(value, numpy.random.RandomState) and _state(value)[0] == "MT19937"
    return twister or isinstance(value, numpy.random.Generator)


def _begin_with(generator: Any, word: int) -> None:
    match _state(generator):
        case (int(version), words, _):  # of Python
            _set_state(generator, (version, (*(word,) * _COUNT, *words[_COUNT:-1], 0), None))
        case {}:  # of NumPy's other generators
            kind = type(generator.bit_generator)
            first = {seed: type(generator)(kind(seed)).random() for seed in range(_SEEDS)}
            _set_state(generator, kind((max if word else min)(first, key=first.__getitem__)).state)
        case (kind, words, *_):
            words = words.copy()
            words[:_COUNT] = word
            _set_state(generator, (kind, words, 0, 0, 0.0))


def _state(generator: Any) -> Any:
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
