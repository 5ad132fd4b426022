"""Log-probabilities of stored rollouts in float64, without packing and micro-batches."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from models.checkpoint import load_model
from models.decoder import forward, head
from utils.devices.sharding import single_device


def stored_logprobs(
    arrays: Mapping[str, np.ndarray], folder: str | Path, temperature: float = 1.0
) -> Float64[np.ndarray, "B T"]:
    """Returns log-probabilities of the tokens of rollouts/step_N.npz, by a forward pass of the model in a folder."""
    model, params, _ = load_model(folder, single_device())
    logits = np.float64(head(model, params, forward(model, params, arrays["tokens"])))[:, :-1] / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, arrays["tokens"][:, 1:, None], axis=-1)[..., 0]
    return np.pad(chosen - np.log(np.exp(logits).sum(axis=-1)), ((0, 0), (1, 0)))
