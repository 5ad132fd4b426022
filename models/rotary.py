"""Rotary position embeddings, with the scalings that models of long contexts are published with.

Letters: B rows, T tokens of a row, C channels of a head, R rotated pairs of channels.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from models.names import Array

Angles = tuple[Float[Array, "*B T 1 R"], Float[Array, "*B T 1 R"]]  # cosines and sines


class Scaling(NamedTuple):
    """Changed frequencies for contexts longer than in the first training; names as in config.json."""

    rope_type: str  # linear: all are divided by `factor`; llama3 and yarn: only those of long waves
    factor: float
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0  # llama3: waves that fit in fewer times than this are slowed
    high_freq_factor: float = 4.0  # and waves that fit in more often are kept
    beta_slow: float = 1.0  # the same for yarn
    beta_fast: float = 32.0

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines, by which yarn sharpens attention. Source: arXiv 2309.00071, equation 22."""
        return 1 + 0.1 * math.log(self.factor) if self.rope_type == "yarn" and self.factor > 1 else 1.0


def frequencies(theta: float, scaling: Scaling | None, num_channels: int) -> Float[Array, "R"]:
    """Returns the radians by which each pair of channels is rotated from one position to the next.

    Wavelengths grow from 2 pi to 2 pi `theta`.
    """
    radians = theta ** (-jnp.arange(0, num_channels, 2) / num_channels)
    if scaling is None:
        return radians
    slower = radians / scaling.factor
    if scaling.rope_type == "linear":
        return slower
    if scaling.rope_type == "yarn":
        share = yarn_share(theta, scaling, num_channels)
    else:  # llama3: by how often a wave fits into the original context; source: apply_scaling of llama-models
        num_waves = scaling.original_max_position_embeddings * radians / (2 * math.pi)
        share = (num_waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        share = jnp.clip(share, 0.0, 1.0)
    return (1 - share) * slower + share * radians


def yarn_share(theta: float, scaling: Scaling, num_channels: int) -> Float[Array, "R"]:
    """Returns how much of each frequency is kept: a ramp over whole channels. Source: arXiv 2309.00071, section 3.2."""

    def channel(num_waves: float) -> float:
        wave = scaling.original_max_position_embeddings / (num_waves * 2 * math.pi)
        return num_channels * math.log(wave) / (2 * math.log(theta))

    first = max(math.floor(channel(scaling.beta_fast)), 0)
    last = min(math.ceil(channel(scaling.beta_slow)), num_channels - 1)
    ramp = (jnp.arange(num_channels // 2) - first) / max(last - first, 1e-3)
    return 1 - jnp.clip(ramp, 0.0, 1.0)


def rotary_angles(
    theta: float, scaling: Scaling | None, num_channels: int, positions: Int[Array, "*B T"]
) -> Angles:
    """Returns cosines and sines that rotate the heads of tokens at these positions."""
    angles = positions[..., None, None] * frequencies(theta, scaling, num_channels)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling and scaling.magnitude != 1:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    one = jnp.eye(cos.shape[-1])
    return jax.lax.platform_dependent(  # no layer computes them again
        cos,
        sin,
        # Out of a product: XLA:CPU moves others into every head of every layer, barrier or not.
        cpu=lambda *angles: tuple(jnp.matmul(x, one, precision="highest") for x in angles),
        default=lambda *angles: jax.lax.optimization_barrier(angles),
    )


def apply_rotary(x: Float[Array, "B T H C"], angles: Angles | None) -> Float[Array, "B T H C"]:
    """Rotates the halves of heads against each other as Hugging Face's models do; None: not at all.

    If there are fewer angles than pairs of channels, the channels after stay as they are.
    Source: arXiv 2104.09864.
    """
    if angles is None:
        return x
    cos, sin = angles
    num_rotated = 2 * cos.shape[-1]
    rotated, rest = x[..., :num_rotated], x[..., num_rotated:]
    a, b = jnp.split(rotated.astype(jnp.float32), 2, axis=-1)
    halves = [a * cos - b * sin, b * cos + a * sin]
    rotated = jnp.concatenate(halves, axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
