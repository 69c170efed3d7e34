"""Pallas kernels for TPU (Mosaic) and GPU (Triton), each behind a function that falls back to plain XLA."""
