"""Tunix as a side of bench/peers.py: its sampler, and its GRPO learner.

Its best settings, as far as known: float32 as ours on CPU, no remat, no KL, a cache of just the length that is needed,
micro-batches of 8 rows (64 at once is slower on CPU), no log-probabilities from the sampler.
"""

import os

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tunix.generate import sampler
    from tunix.models.decoder.model import ModelConfig
    from tunix.models.decoder.params import create_model_from_safe_tensors
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
except ImportError as error:  # then this side is left out
    sampler, missing = None, error

import json
from pathlib import Path


class Numbers:
    """A tokenizer whose texts are token ids; pads with 0, ends never."""

    encode = staticmethod(lambda text, **_: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids, **_: " ".join(map(str, ids)))
    bos_id, eos_id, pad_id = (staticmethod(lambda i=i: i) for i in (None, -1, 0))


def load(folder: str, mesh):
    """Its model with the weights of the folder."""
    given = json.loads((Path(folder) / "config.json").read_text())
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    config = ModelConfig(
        num_layers=given["num_hidden_layers"], vocab_size=given["vocab_size"], embed_dim=given["hidden_size"],
        hidden_dim=given["intermediate_size"], num_heads=given["num_attention_heads"], head_dim=given["head_dim"],
        num_kv_heads=given["num_key_value_heads"], norm_eps=given["rms_norm_eps"],
        rope_theta=int(given["rope_theta"]), use_tied_embedding=given["tie_word_embeddings"], dtype=dtype,
    )  # fmt: skip
    return config, create_model_from_safe_tensors(folder, config, mesh, jnp.float32)


def run(work: dict, variant: str, gate) -> None:
    """One of the works, again and again; `variant` is the number of rows of a micro-batch."""
    if sampler is None:
        raise missing
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    (config, model), group_size, limit = load(work["model_dir"], mesh), work["group_size"], work["limit"]
    prompts = [" ".join(map(str, prompt)) for prompt in work["prompts"]]
    num_prompt_tokens, num_tokens = len(work["prompts"][0]), len(prompts) * group_size * limit
    if work["name"] == "rollout":
        cache = sampler.CacheConfig(num_prompt_tokens + limit, config.num_layers, config.num_kv_heads, config.head_dim)
        sample, texts, tokens = sampler.Sampler(model, Numbers(), cache), np.repeat(prompts, group_size).tolist(), 0
        settings = dict(max_prompt_length=num_prompt_tokens, temperature=1.0, top_p=1.0, eos_tokens=[-1], seed=0)
        while gate(tokens):
            tokens = sum(len(row) for row in sample(texts, limit, **settings).tokens)

    def turns():
        while True:
            jax.block_until_ready(nnx.state(model))
            gate(num_tokens)
            yield {"prompts": prompts}

    training = RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, 0.9, 0.95, 1e-8)),
        eval_every_n_steps=10**9, max_steps=10**6, mini_batch_size=len(prompts),
        train_micro_batch_size=max(1, int(variant or 8) // group_size), rollout_micro_batch_size=len(prompts),
        compute_logps_micro_batch_size=max(1, int(variant or 8) // group_size),
    )  # fmt: skip
    rollout = RolloutConfig(
        max_tokens_to_generate=limit, temperature=1.0, top_p=1.0, max_prompt_length=num_prompt_tokens,
        kv_cache_size=num_prompt_tokens + limit, eos_tokens=[-1],
    )  # fmt: skip
    cluster = RLCluster(
        actor=model, tokenizer=Numbers(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh), rollout_config=rollout,
            training_config=training,
        ),
    )  # fmt: skip
    if work["name"].startswith("update"):
        rows = np.array(work["rows"], np.int32)
        given = RolloutOutput(
            text=[""] * len(rows), logits=[], tokens=list(rows[:, num_prompt_tokens:]),
            left_padded_prompt_tokens=rows[:, :num_prompt_tokens], logprobs=None,
        )  # fmt: skip
        cluster.generate = lambda *_, **__: given
    # It computes old log-probabilities only for several updates of a rollout.
    algorithm = GRPOConfig(num_generations=group_size, beta=0.0, num_iterations=1)
    rewards = lambda prompts, completions, **_: np.linspace(0, 1, len(completions)).tolist()  # noqa: E731
    with mesh:
        GRPOLearner(cluster, algorithm, rewards).train(turns())
    os._exit(0)
