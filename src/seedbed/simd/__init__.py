"""Kernels compiled at run time for the vector unit of the host CPU."""
