"""Global batches as `--global-batch` gives them, in samples or tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping

from partc.errors import PartcError
from partc.ir.program import Program

_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_SPEC = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kKmM]?) ?(tok|token|tokens|samples)?")


def samples(text: str, program: Program) -> int:
    """The number of samples that `512`, `512 samples`, `4M tokens` or `4Mtok` means, given a traced program's
    sequences.

    K and M are 2^10 and 2^20. Raises PartcError P0814.
    """
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise _error(f"--global-batch {text!r} does not parse", "give samples or tokens: 512, 2K, '4M tokens', 4Mtok")
    number = float(found[1]) * _UNITS[found[2].lower()]
    if (found[3] or "samples").startswith("tok"):
        length = sequence_length(program)
        if length is None:
            raise _error(f"--global-batch {text!r}: the batch has no tokens", "give the number of samples")
        if number % length:
            raise _error(
                f"{number:,.0f} tokens are not a whole number of sequences of {length:,}",
                f"give --global-batch {max(1, round(number / length))}, in samples",
            )
        number /= length
    if number < 1 or number != int(number):
        raise _error(f"--global-batch {text!r} is not a whole number of samples", "give 1 or more")
    return int(number)


def batch_size(program: Program) -> int:
    """The number of samples in a traced program's batch."""
    return program.value_types()[program.batch_entries[0]].shape[0]


def sequence_length(program: Program) -> int | None:
    """The tokens of a sample: the length of the second dimension of integer entries; None if there are none."""
    types = [program.value_types()[name] for name in program.batch_entries]
    return next((type.shape[1] for type in types if len(type.shape) > 1 and not type.differentiable), None)


def check_batch(options: Mapping[str, object], size: int) -> None:
    """Raise PartcError P0814 if the batch of a trace does not have the requested size."""
    if "batch" in options and int(str(options["batch"])) != size:
        raise _error(f"the batch has {size} samples, not {options['batch']}", "make batch() read its option `batch`")


def _error(cause: str, help: str) -> PartcError:
    return PartcError("P0814", cause, help=help)
