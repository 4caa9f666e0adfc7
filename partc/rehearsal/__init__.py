"""The prediction of memory: a step of an emitted package runs on tensors without memory, and a ledger counts them."""
