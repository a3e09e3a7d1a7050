"""Torsos: networks from a batch of observations `[B, ...]` to features `[B, D]`, float32.

Parameters are always float32; `dtype` is that of convolutions and of the operands of matrix products
(see `products`). With a `Scaling`, of the shape of one observation, the input of a torso is
`rescale(x, scaling)`. Without it, bytes are divided by 255.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.convolution import Scaling, conv2d, rescale
from seedbed.nets.equivariant import EquivariantMlp
from seedbed.nets.orthogonal import orthogonal
from seedbed.nets.own import is_own, own_torso
from seedbed.nets.pooling import max_pool
from seedbed.nets.products import dot_general_in
from seedbed.nets.residual import residual_block
from seedbed.spaces import Reflection
from seedbed.types import SeedbedError, Tree

TORSOS = ("auto", "nature", "small", "resnet", "mlp")
"""Names of the torsos that are here; any other is a user's (see `own`)."""
SMALLEST = {"nature": 36, "small": 20}
"""Smallest height and width in pixels of an image for a torso."""
hidden_init = orthogonal(2**0.5)
"""Initializer for the kernels of hidden layers."""


def hidden_layer(size: int, dtype: Any) -> nn.Dense:
    """Makes a hidden layer of `size` units, from float32 to float32, with its product in `dtype`."""
    return nn.Dense(size, kernel_init=hidden_init, dot_general=dot_general_in(dtype))


def is_image(shape: tuple[int, ...]) -> bool:
    """Returns whether one observation of this shape is an image, `[H, W, C]`."""
    return len(shape) == 3


def fits_convolutions(shape: tuple[int, ...]) -> bool:
    """Returns whether one observation of this shape is an image that is large enough for `Small`."""
    return is_image(shape) and min(shape[:2]) >= SMALLEST["small"]


def auto_torso(shape: tuple[int, ...]) -> str:
    """Chooses the torso for observations of this shape.

    An image gets nature from 36 x 36 pixels, small from 20 x 20. Smaller images and matrices, vectors and
    numbers get the mlp, which flattens them. Raises SeedbedError if the shape may be that of a larger image
    but is not `[H, W, C]`.
    """
    if fits_convolutions(shape):
        return "nature" if min(shape[:2]) >= SMALLEST["nature"] else "small"
    if is_image(shape):
        if min(shape[1:]) < SMALLEST["small"]:
            return "mlp"
        hint = "looks like an image with channels first: transpose it to [H, W, C]"
    elif len(shape) == 2 and min(shape) >= SMALLEST["small"]:
        hint = "may be an image without channels: make it [H, W, 1]"
    elif len(shape) > 3:
        hint = "has more axes than an image: make it [H, W, C]"
    else:
        return "mlp"
    raise SeedbedError(
        f"an observation of shape {shape} {hint}, or choose torso mlp, which flattens it"
    )


class Convolution(nn.Module):
    """A convolution of images `[B, H, W, C]`; without a scaling, bytes are divided by 255."""

    features: int
    size: int
    stride: int = 1
    padding: int = 0
    relu: bool = True
    gain: float = 2**0.5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, scaling: Scaling | None = None) -> Array:
        """Returns features `[B, OH, OW, F]` in `dtype`."""
        kernel, bias = _weights(self, x.shape[-1], self.features, self.size, self.gain)
        if x.dtype == jnp.uint8 and scaling is None:
            # Dividing a few thousand weights is cheaper than dividing every pixel.
            kernel = kernel / 255.0
        return conv2d(
            x,
            kernel,
            bias,
            stride=self.stride,
            padding=self.padding,
            activation="relu" if self.relu else None,
            scaling=scaling,
            dtype=self.dtype,
        )


class SquareWeights(nn.Module):
    """The weights of a convolution that keeps the number of channels, for `residual_block`."""

    size: int
    gain: float

    @nn.compact
    def __call__(self, channels: int) -> tuple[Array, Array]:
        """Returns a kernel `[size, size, channels, channels]` and a bias `[channels]`."""
        return _weights(self, channels, channels, self.size, self.gain)


def _weights(
    module: nn.Module, channels: int, features: int, size: int, gain: float
) -> tuple[Array, Array]:
    kernel = module.param("kernel", orthogonal(gain), (size, size, channels, features))
    return kernel, module.param("bias", nn.initializers.zeros, (features,))


class Nature(nn.Module):
    """The network of Mnih et al. (2015) for images `[B, H, W, C]`, with 512 features."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, scaling: Scaling | None = None) -> Array:
        """Returns features `[B, 512]`; raises SeedbedError if a side of the images is under 36 pixels."""
        _check_size("nature", x)
        x = Convolution(32, 8, stride=4, dtype=self.dtype)(x, scaling)
        x = Convolution(64, 4, stride=2, dtype=self.dtype)(x)
        x = Convolution(64, 3, stride=1, dtype=self.dtype)(x)
        return Mlp((512,), dtype=self.dtype)(x)


class Small(nn.Module):
    """The network of Mnih et al. (2013) for images `[B, H, W, C]`, with 256 features.

    It does about a third of the work of `Nature`.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, scaling: Scaling | None = None) -> Array:
        """Returns features `[B, 256]`; raises SeedbedError if a side of the images is under 20 pixels."""
        _check_size("small", x)
        x = Convolution(16, 8, stride=4, dtype=self.dtype)(x, scaling)
        x = Convolution(32, 4, stride=2, dtype=self.dtype)(x)
        return Mlp((256,), dtype=self.dtype)(x)


def _check_size(torso: str, images: Array) -> None:
    height, width = images.shape[1:3]
    least = SMALLEST[torso]
    if min(height, width) < least:
        raise SeedbedError(
            f"torso {torso} needs images of at least {least}x{least} pixels but got {height}x{width}; "
            "choose torso auto, resnet or mlp"
        )


class DeepResNet(nn.Module):
    """The deep network of Espeholt et al. (2018), figure 3, for images `[B, H, W, C]`."""

    channels: tuple[int, ...] = (16, 32, 32)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, scaling: Scaling | None = None) -> Array:
        """Returns features `[B, 256]`."""
        names = (f"Convolution_{i}" for i in itertools.count())
        # With the usual gain, sqrt(2), each of the n residual blocks would double the variance. With
        # sqrt(2 / n), it grows by 1 / n in each. There are two blocks for each number of channels.
        branch_gain = len(self.channels) ** -0.5
        for i, channels in enumerate(self.channels):
            entry = Convolution(
                channels, 3, padding=1, relu=False, gain=1.0, dtype=self.dtype, name=next(names)
            )
            x = max_pool(entry(x, None if i else scaling), padding="SAME")
            for _ in range(2):
                first, second = (
                    SquareWeights(3, gain, name=next(names))(channels)
                    for gain in (2**0.5, branch_gain)
                )
                x = residual_block(x, first, second)
        return Mlp((256,), dtype=self.dtype)(nn.relu(x))


class Mlp(nn.Module):
    """Dense layers over flattened `[B, ...]`; without a scaling, bytes are divided by 255."""

    sizes: tuple[int, ...]  # units of the layers
    activation: Callable[[Array], Array] = nn.relu
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, scaling: Scaling | None = None) -> Array:
        """Returns features `[B, sizes[-1]]`."""
        x = _flat(x, scaling)
        for size in self.sizes:
            x = self.activation(hidden_layer(size, self.dtype)(x))
        return x


def _flat(x: Array, scaling: Scaling | None) -> Array:
    """Turns observations `[B, ...]` into float32 vectors `[B, D]`; unscaled bytes are divided by 255."""
    fraction = 1.0 / 255.0 if x.dtype == jnp.uint8 and scaling is None else 1.0
    if scaling is not None:
        x = rescale(x, scaling)
    return x.reshape(x.shape[0], -1).astype(jnp.float32) * fraction


class Torso(nn.Module):
    """A network from a tree of observations, leaves `[B, ...]`, to features.

    Each image goes through a torso called `image`; with auto, `auto_torso` chooses it. All other leaves
    together go through one Mlp of `sizes`, so that it can compare them, such as a place and a goal. A user's
    torso gets the whole tree instead: scaled leaves, and float32 or bytes without a scaling.
    """

    image: str
    sizes: tuple[int, ...]
    activation: Callable[[Array], Array] = nn.relu
    dtype: Any = jnp.float32
    reflection: Reflection | None = None
    """Of all vectors together: the mlp is then an `EquivariantMlp`."""

    @nn.compact
    def __call__(self, observation: Tree, scaling: Tree = None) -> Array:
        """Returns the features of all leaves, concatenated, `[B, D]`.

        `scaling` is None, or a tree with a `Scaling` or None in place of each leaf of the observation.
        """
        leaves, structure = jax.tree.flatten(observation)
        whole = scaling is None
        scalings = [None] * len(leaves) if whole else structure.flatten_up_to(scaling)
        leaves = [x if x.dtype == jnp.uint8 else x.astype(jnp.float32) for x in leaves]
        if is_own(self.image):
            scaled = [
                leaf if scale is None else rescale(leaf, scale)
                for leaf, scale in zip(leaves, scalings, strict=True)
            ]
            return own_torso(self.image).clone(parent=self)(structure.unflatten(scaled))
        features, vectors = [], []
        for leaf, scale in zip(leaves, scalings, strict=True):
            torso = self._image_torso(leaf.shape[1:])
            if torso is None:
                vectors.append(_flat(leaf, scale))
            else:
                features.append(torso(leaf, scale))
        if vectors:
            features.append(self._mlp()(jnp.concatenate(vectors, axis=-1)))
        return jnp.concatenate(features, axis=-1)

    def _mlp(self) -> nn.Module:
        if self.reflection is None:
            return Mlp(self.sizes, self.activation, dtype=self.dtype)
        return EquivariantMlp(self.sizes, self.reflection, self.activation, dtype=self.dtype)

    def _image_torso(self, shape: tuple[int, ...]) -> nn.Module | None:
        """Makes the torso for images of this shape; None for what goes through the Mlp."""
        name = auto_torso(shape) if self.image == "auto" else self.image
        if name == "mlp" or not is_image(shape):
            return None
        if name == "nature":
            return Nature(dtype=self.dtype)
        if name == "small":
            return Small(dtype=self.dtype)
        return DeepResNet(dtype=self.dtype)
