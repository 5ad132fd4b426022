"""Fine-tunes a language model on written replies (SFT): before reinforcement learning, or without it.

    python core/sft.py --model_dir ~/checkpoints/hf/Qwen3-1.7B/ --data replies.jsonl --save_dir ~/runs/sft
    python core/grpo.py --model_dir ~/runs/sft --env_name gsm8k --save_dir ~/runs/gsm8k

Each row is a conversation; -log p of the tokens of its replies is minimized: REINFORCE with all advantages 1.
With --env_name, held-out problems of an environment are played before, during and after training.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from core.advantages import ObjectiveConfig
from core.grpo import make_workers, task_numbers
from core.learner import Learner, make_learner
from core.records import Batch, Episodes, Progress
from core.rollout import RolloutWorker, evaluate_held_out
from core.run.card import SFT
from core.run.fingerprints import NUM_RENDERED, fingerprint_rows, fingerprint_tokens
from core.run.folder import STOPPED, Run, is_due, settings_of_adapters
from core.run.metrics import loss_metrics, row_losses
from core.sampler import SamplingConfig
from envs import test_name
from envs.data.messages import Messages
from envs.own.written import DataConfig, read_written
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, RolloutSettings, also_evaluated, check_files, resolve_settings
from models.checkpoint import load_policy
from models.conversations import Conversation, describe_prompts, encode_rows
from models.lora import LoraConfig
from models.memory import BETWEEN, ELSEWHERE, MemoryConfig
from models.optimizers import OptimizerConfig, describe_optimizer
from models.oracle import check_rows
from models.state import TrainState
from models.tokenizer import Tokenizer
from utils.devices.sharding import Layout
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.settings.config import make_config, parse
from utils.settings.errors import UserError, counted, user_errors
from utils.settings.groups import ComputeConfig, EvalConfig, RunConfig, UpdateConfig
from utils.settings.options import group, option

LOGGED = ("lr", "grad_norm", "update_norm", "param_norm", "speed/padding")  # metrics of the learner that are logged


@dataclass(frozen=True)
class PlayedConfig(EnvConfig):
    """Environment of the held-out score."""

    env_name: str = option(
        "", "Environment X whose held-out problems (X-test) are evaluated; empty: none", essential=True
    )


@dataclass(frozen=True)
class SftOptimizerConfig(OptimizerConfig):
    """Optimizer of supervised fine-tuning."""

    lr: float = 2e-5
    lr_schedule: str = "linear"


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning."""

    model_dir: str = option(
        "models/tiny", "Model to train: Hugging Face folder, hub id, or run folder (its last step)", essential=True
    )
    seed: int = option(0, "Seed of the row order, of new adapters, and of sampling")
    num_epochs: int = option(3, "Number of passes over the rows; 0: as many as --max_steps takes", essential=True)
    max_steps: int = option(0, "Limit on steps, if reached before --num_epochs; 0: no limit", essential=True)
    batch_size: int = option(16, "Rows in a step; a step is one update", essential=True)
    test_interval: int = option(
        20, "Steps between held-out evaluations; 0: only before and after training", resumable=True
    )
    data: DataConfig = group(DataConfig)
    env: PlayedConfig = group(PlayedConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    rewards: RewardConfig = group(RewardConfig)
    eval: EvalConfig = group(EvalConfig)
    optimizer: SftOptimizerConfig = group(SftOptimizerConfig)
    lora: LoraConfig = group(LoraConfig)
    memory: MemoryConfig = group(MemoryConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)
    run: RunConfig = group(RunConfig)

    group_size = 1  # rows of an example, which are adjacent: two of a pair of preferences
    update, updates_per_step, trusts_sampler = UpdateConfig(), 1, False  # the learner reads them
    objective = make_config(ObjectiveConfig, objective="reinforce", advantage="reinforce", entropy_coef=0.0)

    def __post_init__(self):
        if self.batch_size < 1 or min(self.num_epochs, self.max_steps, self.seed, self.test_interval) < 0:
            raise UserError(
                "--batch_size must be at least 1, and --num_epochs, --max_steps, --seed and --test_interval at least "
                "0: correct the one that is lower"
            )
        if not self.num_epochs and not self.max_steps:
            raise UserError("--num_epochs 0 and --max_steps 0 set no end of the run: give --num_epochs or --max_steps")
        if self.run.save_best and not self.env.env_name:
            raise UserError("--save_best chooses by a held-out score: give --env_name")

    @property
    def num_tests(self) -> int | None:
        """Held-out rows of an evaluation at most; None: all."""
        num_examples = {-1: 512}.get(self.eval.num_eval_tasks, self.eval.num_eval_tasks)
        return num_examples * self.group_size or None

    @property
    def minibatch_size(self) -> int:
        return self.batch_size * self.group_size

    def num_steps(self, num_rows: int) -> int:
        """Returns the steps of a run on this many rows."""
        by_epochs = -(-self.num_epochs * num_rows // self.minibatch_size) or math.inf
        return min(by_epochs, self.max_steps or by_epochs)

    @property
    def place_of_sampling(self) -> str:
        return BETWEEN if self.env.env_name else ELSEWHERE


class SftRun(Run):
    """A run without rollouts."""

    command, curve, last_step = SFT, "data/loss", 0
    read, example = staticmethod(read_written), "row"  # reads the data; what a step has --batch_size of
    tests: Sequence[Messages] = ()  # held-out conversations
    rows: Sequence[Conversation] = ()

    def __init__(
        self, config: SFTConfig, layout: Layout, environments: Mapping[str, RolloutSettings], tests: Sequence[Messages]
    ):
        self.tests = tests
        super().__init__(config, layout, environments)

    def fingerprint(self) -> dict[str, str]:
        """Returns fingerprints of the rows: see `Run.fingerprint`."""
        held_out = {"held-out data": fingerprint_rows(self.tests)} if self.tests else {}
        return super().fingerprint() | held_out

    def fingerprint_prompts(self) -> dict[str, str]:
        """Returns fingerprints of what the model reads: see `Run.fingerprint_prompts`."""
        rows = [row.tokens for row in self.rows[:NUM_RENDERED]]
        return super().fingerprint_prompts() | {"tokens of the first rows": fingerprint_tokens(rows)}

    def describe_work(self) -> list[str]:
        return [f"{counted(self.last_step, 'step')} of {counted(self.settings['batch_size'], self.example)}"]

    def weigh(self, learner: Learner, state: TrainState, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Returns the batch with the advantages by which it is learned, and metrics of it."""
        return batch, {}

    def measure(
        self, learner: Learner, state: TrainState, batch: Batch
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Returns metrics of held-out rows, and the arrays of their losses."""
        logprobs = learner.compute_outputs(learner.policy(state.params), batch).logprobs
        return loss_metrics(logprobs, batch.mask), row_losses(logprobs, batch.mask)

    def saved_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of saved models, with the prompts and stop tokens of training."""
        return self.tokenizer.with_generation({}).with_training_prompts(self.environments["env"].env.thinking, "")


def main(config: SFTConfig, run_class: type[SftRun] = SftRun) -> None:
    layout = make_layout(config.devices, config.model_dir)
    data, tests = run_class.read(config.data)
    played = {}
    if config.env.env_name:
        check_files(config.env, [config.env.env_name])
        num_tokens, force_answer_at = config.sampling.num_generation_tokens, config.sampling.force_answer_at
        test = resolve_settings(config.env, test_name(config.env.env_name), num_tokens, force_answer_at)
        played["test_env"], *others = also_evaluated(
            config.env, [test], config.eval.also_eval, num_tokens, force_answer_at
        )
        played |= {f"test_env.{settings.label}": settings for settings in others}
    run = run_class(config, layout, {"env": data} | played, tests)
    model, base, params, tokenizer = load_policy(
        run.model_dir, config.lora, config.seed, layout, **config.compute.arguments
    )
    encode = partial(encode_rows, tokenizer, **config.data.encoding)
    rows, note = encode(data.name, data.env.conversations)
    notes = check_rows(tokenizer, data.name, data.env.conversations, config.data.train_on)
    held_out = encode("held out", tests)[0][: config.num_tests] if tests else []
    workers = make_workers(config, played, model, tokenizer, layout, run.directory)
    softmax = replace(config, sampling=SamplingConfig(prompt_length=1))  # trained, however replies are sampled
    most_tokens = max(map(len, rows + held_out))
    model.check_positions("a row", most_tokens, "lower --max_length")
    learner, state = make_learner(softmax, model, params, layout, most_tokens - 1, run.write_bad_batch, base)
    del params  # the state holds them, and each update replaces them
    workers = {role: worker.with_room(learner.sampling_room, config.batch_size) for role, worker in workers.items()}
    state, progress = run.restore(state)
    run.rows, run.last_step = rows, config.num_steps(len(rows))
    with run.start(model, tokenizer, workers.values()):  # however the run ends, what it has reached is saved
        run.print(f"{run.model_dir}: {model.num_parameters:,} parameters", *run.notes, note, *notes, *learner.notes)
        run.print(describe_optimizer(config.optimizer, state.params))
        for worker in workers.values():
            run.print(*worker.notes, *describe_prompts(tokenizer, data.env.thinking, worker.env.problem(0).thinking))
        train(config, run, workers, learner, rows, held_out, state, progress)


def train(
    config: SFTConfig,
    run: SftRun,
    workers: Mapping[str, RolloutWorker],
    learner: Learner,
    rows: Sequence[Conversation],
    held_out: Sequence[Conversation],
    state: TrainState,
    progress: Progress,
) -> None:
    """Makes an update with each batch of rows; every epoch has them in a new order."""
    if progress.step == 0 and (workers or held_out):
        with run.interruptible():
            metrics, examples, losses = evaluate(config, run, workers, learner, held_out, state)
        run.write_losses(0, losses)
        progress = run.log_start(metrics, examples, state, progress)

    num_examples = len(rows) // config.group_size
    while progress.step < run.last_step and STOPPED not in progress.memory:
        with run.phase("data"):
            end = min(progress.cursor + config.batch_size, config.num_epochs * num_examples or sys.maxsize)
            numbers = task_numbers(config.seed, num_examples, np.arange(progress.cursor, end))
            batch = make_batch([rows[i * config.group_size + k] for i in numbers for k in range(config.group_size)])
        batch, weighed = run.weigh(learner, state, batch)
        with run.phase("update"):
            state, update = learner.update(state, batch, progress.step / run.last_step)
            updated = learner.metrics([update])  # blocks until the update is done
        progress = progress.after_step(end, num_rollouts=0)
        is_last = progress.step == run.last_step

        metrics = run.times | {name: updated[name] for name in LOGGED} | {"num_rows": len(batch)}
        metrics |= {"data/loss": updated["loss"], "data/entropy": updated["entropy"], "data/epochs": end / num_examples}
        metrics |= weighed
        metrics["speed/tokens_per_second"] = batch.lengths.sum() / run.times["times/update"]
        is_last = is_last or run.met_rule(progress, metrics) != ""  # of --stop_at
        if (workers or held_out) and (is_last or is_due(progress.step, config.test_interval)):
            scores, examples, losses = evaluate(config, run, workers, learner, held_out, state)
            run.write_losses(progress.step, losses)
            if examples is not None:
                run.write_held_out(progress.step, examples)
            metrics |= scores
        progress = run.end_step(progress, state, metrics, None, batch, is_last)
    run.print_summary(progress, state)


def make_batch(rows: Sequence[Conversation]) -> Batch:
    """Returns rows to train on: an advantage of 1 for each token of a reply."""
    lengths = np.array([len(row) for row in rows])
    mask = np.zeros((len(rows), lengths.max()), bool)
    tokens = np.zeros(mask.shape, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row.tokens, row.mask
    return Batch(
        tokens=tokens,
        mask=mask,
        sample_logprobs=np.zeros(mask.shape, np.float32),
        rewards=np.ones(len(rows), np.float32),
        lengths=lengths,
        prompt_lengths=mask.argmax(axis=1),
        advantages=np.float32(mask),
    )


def evaluate(
    config: SFTConfig,
    run: SftRun,
    workers: Mapping[str, RolloutWorker],
    learner: Learner,
    held_out: Sequence[Conversation],
    state: TrainState,
) -> tuple[dict[str, float], Episodes | None, dict[str, np.ndarray]]:
    """Returns metrics, the environment's episodes, and the losses of held-out rows, as far as there are any."""
    clock, metrics, examples, losses = time.perf_counter(), {}, None, {}
    if workers:
        metrics, examples = evaluate_held_out(workers, learner.policy(state.params), config.eval, config.seed)
    if held_out:
        found, losses = run.measure(learner, state, make_batch(held_out))
        metrics |= found
    metrics["times/test"] = time.perf_counter() - clock
    return metrics, examples, losses


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(SFTConfig, sys.argv[1:], __doc__, implied=settings_of_adapters))
