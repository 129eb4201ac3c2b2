"""What the CUDA benchmarks share: problems, contestants, errors against float64, steady-state timing, tables."""
