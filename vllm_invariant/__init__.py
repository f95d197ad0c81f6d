"""Bitwise batch-invariant serving of Gated-DeltaNet hybrids on stock vLLM."""

__version__ = "0.1.0"
