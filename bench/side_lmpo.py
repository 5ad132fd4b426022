"""This repository as a side of bench/peers.py. Episodes are played as in training, with the environment in processes.

`variant` is NAME=VALUE:NAME=VALUE of settings; of a rollout also `call_rows`, rows sampled at a time (default: all).
"""

from dataclasses import replace

import jax
import numpy as np

from bench import train_step
from bench.fixed_episodes import FixedEpisodes
from bench.side import ROLLOUTS, Gate, Work
from core.config import Config
from core.grpo import make_batch
from core.learner import make_learner
from core.records import Episodes
from core.rollout import RolloutWorker, make_worker
from core.sampler import Sampler
from envs.base import ForcedAnswer
from envs.settings import RolloutSettings
from models.architecture import Decoder
from models.checkpoint import load_model
from models.names import Params
from models.pages import Paging
from models.tokenizer import Tokenizer
from utils.devices.runtime import prepare
from utils.devices.sharding import Layout
from utils.devices.startup import make_layout
from utils.settings.config import parse

NUM_WARMUP = 3  # rollouts before the first run: which programs are compiled depends on when the environment answers


def run(work: Work, variant: str, gate: Gate) -> None:
    """Runs a work again and again; the process ends at the gate."""
    prepare()  # as every command does
    flags = dict(setting.split("=") for setting in variant.split(":") if setting)
    if work["name"] in ROLLOUTS:
        run_rollout(work, {name: int(value) for name, value in flags.items()}, gate)
    flags |= {"groups_per_batch": len(work["prompts"]), "group_size": work["group_size"]}
    flags["num_generation_tokens"] = work["limit"]
    config = parse(train_step.BenchTraining, [f"--{name}={value}" for name, value in flags.items()])
    layout = make_layout(config.devices)
    model, params, tokenizer = load_model(work["model_dir"], layout, **config.compute.arguments)
    if work["name"].startswith("turns"):
        with make_turns_worker(work, config, model, tokenizer, layout) as worker:
            run_turns(work, config, worker, params, gate)
    if work["name"] == "step":
        run_steps(work, config, model, params, layout, gate)
    batch = train_step.make_batch(work["rows"], len(work["prompts"][0]), work["group_size"])
    update = train_step.make_update(config, model, params, layout, batch, with_old=work["name"] == "update")
    num_tokens = 0
    while gate(num_tokens):
        update()
        num_tokens = batch.mask.sum()


def run_rollout(work: Work, settings: dict[str, int], gate: Gate) -> None:
    """Samples the same completions again and again, from weights that are laid out anew."""
    model, params, _ = load_model(work["model_dir"], dtype="")
    prompts, group_size = work["prompts"], work["group_size"]
    per_call = settings.pop("call_rows", len(prompts) * group_size) // group_size
    paging = Paging(num_slots=settings.pop("block_size", 0))
    sampler = Sampler(model, work["limit"], tuple(work["stop_ids"]), paging=paging, **settings)
    lengths = []
    while gate(sum(lengths), lengths=lengths):
        lengths = []
        for first in range(0, len(prompts), per_call):
            own = prompts[first : first + per_call]
            ids = first + np.arange(len(own))
            completions = sampler.generate(sampler.load_weights(params), own, ids, group_size, jax.random.key(0))
            lengths += (completions.lengths - completions.prompt_lengths).tolist()


def run_steps(work: Work, config: Config, model: Decoder, params: Params, layout: Layout, gate: Gate) -> None:
    """Makes steps of GRPO; the reward is the share of even token ids, which costs next to nothing."""
    limit = config.sampling.num_generation_tokens
    sampler = Sampler(model, limit, (), layout=layout)
    learner, state = make_learner(config, model, params, layout, limit)
    ids, number, num_tokens = np.arange(len(work["prompts"])), 0, 0
    while gate(num_tokens):
        number += 1
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        weights = sampler.load_weights(state.params)
        completions = sampler.generate(weights, work["prompts"], ids, work["group_size"], key)
        batch = train_step.batch_of(completions, work["group_size"])
        state = train_step.learn(config, learner, state, batch, number)
        num_tokens = completions.mask.sum()


def make_turns_worker(
    work: Work, config: Config, model: Decoder, tokenizer: Tokenizer, layout: Layout
) -> RolloutWorker:
    """Returns a worker whose turns end at their limit only."""
    env = FixedEpisodes(**work["env_options"])
    env.tokens_per_turn = work["turn_tokens"]
    name = f"{FixedEpisodes.__module__}:{FixedEpisodes.__name__}"
    settings = RolloutSettings(name, work["env_options"], env, work["limit"], 0, ForcedAnswer())
    worker = make_worker(settings, config.sampling, config.rewards, model, tokenizer, layout)
    return replace(worker, sampler=replace(worker.sampler, stop_ids=()))


def run_turns(work: Work, config: Config, worker: RolloutWorker, params: Params, gate: Gate) -> None:
    """Plays episodes again and again, and learns from them if the work is a step."""
    tasks = np.arange(len(work["prompts"]))
    group_size = work["group_size"]
    is_step = work["name"] == "turns_step"
    if is_step:
        learner, state = make_learner(config, worker.sampler.model, params, worker.layout, work["limit"])
        params = state.params
    keys = jax.random.split(jax.random.key(config.seed), NUM_WARMUP)
    for key in keys:
        worker.play(worker.load_weights(params), tasks, group_size, key)
    number, num_tokens = 0, 0
    while gate(num_tokens):
        number += 1
        key = jax.random.fold_in(keys[0], number)
        episodes = worker.play(worker.load_weights(params), tasks, group_size, key)
        num_tokens = check_turns(episodes, work)
        if is_step:
            batch = make_batch(replace(episodes, batch_rollouts=np.arange(len(episodes.texts))), config)
            state = train_step.learn(config, learner, state, batch, number)
            params = state.params


def check_turns(episodes: Episodes, work: Work) -> int:
    """Returns the number of sampled tokens. Raises: AssertionError if an episode has another length than planned."""
    completions = episodes.completions
    lengths = completions.lengths - completions.prompt_lengths
    assert (lengths == work["limit"]).all() and not episodes.failed.any(), lengths
    prompts = completions.tokens[:: work["group_size"], : len(work["prompts"][0])]
    assert prompts.tolist() == work["prompts"]
    return int(completions.mask.sum())
