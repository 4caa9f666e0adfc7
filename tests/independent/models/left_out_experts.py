"""Experts that some steps, or all, leave without a row: eagerly their grad is None, and the optimizer leaves them."""

from __future__ import annotations

from tests.models.left_out import batch, data, model

__all__ = ["batch", "data", "model"]
