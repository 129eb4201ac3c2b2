"""Shared by the CUDA benchmarks: problems, contestants, errors against float64, steady-state timing, tables."""
