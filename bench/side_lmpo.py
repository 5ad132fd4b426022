"""This repository as a side of bench/peers.py, by the functions of rollout.py, train_step.py and grpo_step.py."""

from bench import grpo_step, train_step
from bench.rollout import make_rollout, num_completion_tokens
from models.checkpoint import load_model
from utils.devices.sharding import make_layout
from utils.settings.config import parse


def run(work: dict, variant: str, gate) -> None:
    """One of the works, again and again; `variant` is NAME=VALUE:NAME=VALUE of settings."""
    name, group_size, limit, tokens = work["name"], work["group_size"], work["limit"], 0
    if name in ("rollout", "long_tail"):
        settings = {name: int(value) for name, value in (part.split("=") for part in variant.split(":") if part)}
        model, params, _ = load_model(work["model_dir"], dtype="")
        rollout = make_rollout(model, params, work["prompts"], group_size, limit, work["stop_ids"], **settings)
        lengths = []
        while gate(tokens, lengths=lengths):
            rollouts = rollout()
            tokens, lengths = num_completion_tokens(rollouts), (rollouts.lengths - rollouts.prompt_lengths).tolist()
    given = [f"--{setting}" for setting in variant.split(":") if setting]
    given += [f"--groups_per_batch={len(work['prompts'])}", f"--group_size={group_size}"]
    given += [f"--num_generation_tokens={limit}", f"--recompute_logprobs={name == 'update'}"]
    config = parse(grpo_step.Command, given)[0]
    layout = make_layout(config)
    model, params, _ = load_model(work["model_dir"], layout, config.dtype, **train_step.layers(config))
    if name == "step":
        step = grpo_step.make_step(config, model, params, layout, work["prompts"])
        while gate(tokens):
            tokens = step()["tokens"]
    batch = train_step.make_batch(work["rows"], len(work["prompts"][0]), group_size)
    update = train_step.make_update(config, model, params, layout, batch)
    while gate(tokens):
        update()
        tokens = batch.mask.sum()
