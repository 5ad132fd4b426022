"""Log-probabilities of stored rollouts in float64, without packing and micro-batches."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from models.checkpoint import load_model
from models.decoder import forward, head
from utils.devices.sharding import single_device


def stored_logits(arrays: Mapping[str, np.ndarray], folder: str | Path) -> Float64[np.ndarray, "B T V"]:
    """Returns the logits from which each token of rollouts/step_N.npz was sampled, by the model in a folder."""
    model, params, _ = load_model(folder, single_device())
    return np.roll(np.float64(head(model, params, forward(model, params, arrays["tokens"]))), 1, axis=1)


def stored_logprobs(
    arrays: Mapping[str, np.ndarray], folder: str | Path, temperature: float | np.ndarray = 1.0
) -> Float64[np.ndarray, "B T"]:
    """Returns log-probabilities of the tokens of rollouts/step_N.npz; 0 for the first of each row."""
    logits = stored_logits(arrays, folder) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, arrays["tokens"][..., None], axis=-1)[..., 0]
    return (chosen - np.log(np.exp(logits).sum(axis=-1))) * (np.arange(chosen.shape[1]) > 0)
