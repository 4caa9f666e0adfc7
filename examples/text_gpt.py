"""The model of gpt.py on real text, a token for each byte: `partc compile examples/text_gpt.py --mesh 2x2x1`.

The text is alice29.txt next to this file, or `-D text=FILE`. A package carries this file and gpt.py but no data:
it looks for FILE as it is given, then next to its own model.py.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from gpt import GPT, Config, loss
from torch import Tensor, nn

__all__ = ["batch", "data", "loss", "model"]

TEXT = "examples/alice29.txt"
BATCH, LENGTH = 16, 128


def model(width: int = 128, depth: int = 4) -> nn.Module:
    return GPT(Config(width=width, depth=depth, heads=4, kv_heads=2, hidden=11 * width // 4, vocabulary=256))


def batch() -> dict[str, Tensor]:
    return {name: torch.zeros(BATCH, LENGTH, dtype=torch.int64) for name in ("ids", "labels")}


def data(step: int, text: str = TEXT) -> dict[str, Tensor]:
    """Pieces of the text from random places, the same ones whenever a step is asked for."""
    characters = read(text)
    places = torch.randint(len(characters) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    rows = characters[places + torch.arange(LENGTH + 1)].long()
    return {"ids": rows[:, :-1], "labels": rows[:, 1:]}


@lru_cache(maxsize=1)
def read(text: str) -> Tensor:
    """Its bytes, with ends of lines as on Unix."""
    neighbour = Path(__file__).with_name(Path(text).name)
    found = next((path for path in (Path(text), neighbour) if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no {text} here and no {neighbour}: copy one there, or compile with -D text=FILE")
    return torch.frombuffer(bytearray(found.read_bytes().replace(b"\r\n", b"\n")), dtype=torch.uint8)
