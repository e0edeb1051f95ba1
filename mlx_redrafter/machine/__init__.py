"""What depends on this machine: BLAS, CUDA, wired memory, its description, sums of memory."""
