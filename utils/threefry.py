"""Threefry, which makes JAX's random bits, as operators on arrays of NumPy or JAX.

Inside of jit it is one kernel, to compile in a tenth of the time of jax.random's; NumPy computes it with nothing to
compile. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import jax
import numpy as np
from jaxtyping import Int, UInt32

Word = UInt32[np.ndarray | jax.Array, "..."]
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[Word, Word], numbers: Int[np.ndarray | jax.Array, "..."]) -> tuple[Word, Word]:
    """Returns the two words that each number is encrypted to: as a key, that of jax.random.fold_in."""
    words = *key, key[0] ^ key[1] ^ PARITY
    high, low = words[0], numbers.astype(np.uint32) + words[1]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            high = high + low
            low = (low << np.uint32(rotation) | low >> np.uint32(32 - rotation)) ^ high
        high = high + words[(i + 1) % 3]
        low = low + words[(i + 2) % 3] + np.uint32(i + 1)
    return high, low


def make_key(seed: int, *numbers: int) -> jax.Array:
    """Returns jax.random.key(seed), into which the numbers are folded one after the other, without a program."""
    words = np.zeros(1, np.uint32), np.array([seed % 2**32], np.uint32)
    for number in numbers:
        words = threefry(words, np.array([number]))
    return jax.random.wrap_key_data(np.concatenate(words))
