"""Measurements on real servers.  Run from the repository's root: ``python -m benchmarks.run_serving``."""
