"""What depends on this machine: BLAS, CUDA, wired memory, its description and memory."""
