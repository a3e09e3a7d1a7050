"""Kernels for NVIDIA GPUs: PTX from the same program, one thread for each example."""
