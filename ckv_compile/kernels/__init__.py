"""CUDA kernels of operators that run between graphs, or beside torch's own kernels: launched here, not lowered."""
