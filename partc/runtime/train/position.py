"""The state of a data source as text, for a checkpoint's manifest: nested Python values, tensors and arrays.

Every value is `[kind, content]`, so that tuples, integer keys and infinities come back as they were.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import torch
from torch import Tensor

from ..documents import Malformed
from ..layout import DTYPES

_PLAIN = (type(None), bool, str)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES.values(), torch.uint16, torch.uint32, torch.uint64)
}


def encoded(state: Any) -> str:
    """The state as text. Raises Malformed."""
    return json.dumps(_packed(state))


def decoded(text: str) -> Any:
    """The inverse of `encoded`. Raises Malformed."""
    try:
        return _unpacked(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError, OverflowError) as error:
        raise Malformed(f"is not a state of data: {type(error).__name__}") from None


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        x = value.detach().cpu().contiguous()
        return ["tensor", str(x.dtype).removeprefix("torch."), list(x.shape), _bytes(x)]
    if type(value) in _PLAIN:
        return ["plain", value]
    if type(value) in (int, float):
        return [type(value).__name__, repr(value)]
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if type(value) in (list, tuple, set):
        return [type(value).__name__, [_packed(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_packed(key), _packed(item)] for key, item in value.items()]]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biuf":
        x = torch.from_numpy(numpy.ascontiguousarray(value))
        return ["array", str(x.dtype).removeprefix("torch."), list(value.shape), _bytes(x)]
    raise Malformed(f"holds a {type(value).__name__}")


def _unpacked(item: Any) -> Any:
    kind, *content = item
    match kind:
        case "tensor":
            return _tensor(*content)
        case "array":
            return _tensor(*content).numpy()
        case "plain":
            return content[0]
        case "int" | "float":
            return {"int": int, "float": float}[kind](content[0])
        case "bytes":
            return base64.b64decode(content[0])
        case "dict":
            return {_unpacked(key): _unpacked(value) for key, value in content[0]}
    return {"list": list, "tuple": tuple, "set": set}[kind](map(_unpacked, content[0]))


def _bytes(x: Tensor) -> str:
    return base64.b64encode(bytes(x.reshape(-1).view(torch.uint8).tolist())).decode()


def _tensor(dtype: str, shape: list[int], content: str) -> Tensor:
    data = bytearray(base64.b64decode(content))
    flat = torch.frombuffer(data, dtype=_DTYPES[dtype]) if data else torch.empty(0, dtype=_DTYPES[dtype])
    return flat.reshape(shape).clone()
