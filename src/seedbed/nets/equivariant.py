"""Layers that are equivariant under a mirror: of reflected inputs they make reflected outputs, exactly.

Features are half even, which a mirror does not change, and half odd, whose signs it changes. Matrix products
keep them apart, so that each is half the work. The sums and differences of even and odd features are pairs
that a mirror exchanges: an activation of each mixes both kinds. This is the network of Cohen and Welling
(2016), "Group Equivariant Convolutional Networks", for the group of two elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from seedbed.nets.orthogonal import orthogonal
from seedbed.nets.products import multiply
from seedbed.spaces import Reflection

_HALF = math.sqrt(0.5)


class Symmetry(NamedTuple):
    """The reflections of what an actor-critic network gets and returns, flat."""

    policy: Reflection  # of what the policy sees
    value: Reflection  # of what the value sees
    parameters: Reflection  # of the policy's parameters


def halves(reflection: Reflection) -> tuple[np.ndarray, np.ndarray]:
    """Returns orthonormal bases of the even and of the odd vectors, [N, E] and [N, N - E]."""
    size = len(reflection.order)
    even, odd = [], []
    for i, (j, sign) in enumerate(zip(reflection.order, reflection.signs, strict=True)):
        basis = np.zeros(size, np.float32)
        if i == j:
            basis[i] = 1
            (even if sign > 0 else odd).append(basis)
        elif i < j:
            basis[i], basis[j] = _HALF, sign * _HALF
            even.append(basis)
            odd.append(np.where(np.arange(size) == j, -basis, basis))
    return tuple(np.array(part, np.float32).reshape(-1, size).T for part in (even, odd))  # type: ignore[return-value]


class EquivariantMlp(nn.Module):
    """Dense layers over vectors `[B, D]`; a mirror changes the signs of the second half of the features."""

    sizes: tuple[int, ...]  # units of the layers, even numbers
    reflection: Reflection  # of the input
    activation: Callable[[Array], Array] = nn.relu
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns features `[B, sizes[-1]]`, the even ones first."""
        bases, half = halves(self.reflection), self.sizes[0] // 2
        kernels = [
            basis @ self._kernel(name, basis.shape[1], half)
            for name, basis in zip(("even", "odd"), bases, strict=True)
        ]
        both = multiply(x, jnp.concatenate(kernels, axis=1), self.dtype)
        even, odd = both[:, :half], both[:, half:]
        for i, size in enumerate(self.sizes):
            if i:
                even = multiply(even, self._kernel(f"even_{i}", half, size // 2), self.dtype)
                odd = multiply(odd, self._kernel(f"odd_{i}", half, size // 2), self.dtype)
                half = size // 2
            # Odd features have none: a number is even.
            even += self.param(f"bias_{i}", nn.initializers.zeros, (half,))[None]
            one, other = (
                self.activation(_HALF * (even + odd)),
                self.activation(_HALF * (even - odd)),
            )
            even, odd = _HALF * (one + other), _HALF * (one - other)
        return jnp.concatenate([even, odd], axis=-1)

    def _kernel(self, name: str, rows: int, columns: int) -> Array:
        """Returns a kernel [rows, columns]; a mirror may leave no even, or no odd, numbers of an input."""
        initial = orthogonal(2**0.5) if rows else nn.initializers.zeros
        return jnp.asarray(self.param(name, initial, (rows, columns)))


class EquivariantHead(nn.Module):
    """A layer from even and odd features `[..., D]` to a policy's parameters `[..., size]`, at first 0."""

    reflection: Reflection  # of the parameters

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the parameters `[..., size]`, which are nearly 0 for initial weights."""
        half, initial = x.shape[-1] // 2, orthogonal(0.01)
        even, odd = halves(self.reflection)
        shapes = {"even": (half, even.shape[1]), "odd": (half, odd.shape[1])}
        upper, lower = (
            self.param(name, initial if shape[1] else nn.initializers.zeros, shape)
            for name, shape in shapes.items()
        )
        bias = self.param("bias", nn.initializers.zeros, (even.shape[1],))
        returned = x @ jnp.concatenate([upper @ even.T, lower @ odd.T])
        return returned + (bias @ even.T).reshape((1,) * (x.ndim - 1) + (-1,))
