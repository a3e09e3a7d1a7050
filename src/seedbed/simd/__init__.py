"""Compiles kernels at run time for the vector unit of the host CPU."""

from seedbed.simd.inspect import Report, inspect
from seedbed.simd.vectorize import vectorize

__all__ = ["Report", "inspect", "vectorize"]
