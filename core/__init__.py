"""The loop of GRPO, what it is made of, and the commands; core/grpo.py comes first."""

import gc

import jax  # noqa: F401

gc.freeze()  # what JAX's import made lives as long as the process: collections skip it, and commands start faster
