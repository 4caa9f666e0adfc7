"""The prediction of memory: a step of an emitted package runs on meta tensors, and a ledger counts their bytes."""
