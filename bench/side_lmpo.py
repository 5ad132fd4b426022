"""This repository as a side of bench/peers.py, by the functions of rollout.py, train_step.py and grpo_step.py."""

from bench import grpo_step, train_step
from bench.rollout import completion_lengths, make_rollout
from bench.side import Gate, Work
from core.sampling import Sampler
from models.checkpoint import load_model
from utils.devices.startup import make_layout
from utils.settings.config import parse


def run(work: Work, variant: str, gate: Gate) -> None:
    """Runs a work again and again; `variant` is NAME=VALUE:NAME=VALUE of settings."""
    settings = [setting.split("=") for setting in variant.split(":") if setting]
    if work["name"] in ("rollout", "long_tail"):
        run_rollout(work, {name: int(value) for name, value in settings}, gate)
    flags = {name: value for name, value in settings}
    flags |= {"groups_per_batch": len(work["prompts"]), "group_size": work["group_size"]}
    flags |= {"num_generation_tokens": work["limit"], "recompute_logprobs": work["name"] == "update"}
    config = parse(train_step.BenchTraining, [f"--{name}={value}" for name, value in flags.items()])
    layout = make_layout(config.devices)
    model, params, _ = load_model(work["model_dir"], layout, **config.compute.arguments)
    num_tokens = 0
    if work["name"] == "step":
        step = grpo_step.make_step(config, model, params, layout, work["prompts"])
        while gate(num_tokens):
            num_tokens = step()["tokens"]
    batch = train_step.make_batch(work["rows"], len(work["prompts"][0]), work["group_size"])
    update = train_step.make_update(config, model, params, layout, batch)
    while gate(num_tokens):
        update()
        num_tokens = batch.mask.sum()


def run_rollout(work: Work, settings: dict[str, int], gate: Gate) -> None:
    """Samples again and again; the process ends at the gate."""
    model, params, _ = load_model(work["model_dir"], dtype="")
    sampler = Sampler(model, work["limit"], tuple(work["stop_ids"]), **settings)
    rollout = make_rollout(sampler, params, work["prompts"], work["group_size"])
    lengths = []
    while gate(sum(lengths), lengths=lengths):
        lengths = completion_lengths(rollout()).tolist()
