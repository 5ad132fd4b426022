"""Fine-tunes a language model on demonstrations (SFT), before reinforcement learning or instead of it.

    python core/sft.py --model_dir ~/checkpoints/hf/Qwen3-1.7B/ --data replies.jsonl --save_dir ~/runs/sft
    python core/grpo.py --model_dir ~/runs/sft --env_name gsm8k --save_dir ~/runs/gsm8k

Each row is a conversation; -log p of the tokens of its replies is minimized: REINFORCE with all advantages 1.
With --env_name, held-out problems of environments are played before, during and after training.
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
from core.grpo import evaluate_policy, make_workers, task_numbers
from core.learner import Learner, make_learner
from core.records import Batch, Progress
from core.rollout import RolloutWorker
from core.run.card import SFT
from core.run.fingerprints import NUM_RENDERED, fingerprint_rows, fingerprint_tokens
from core.run.folder import settings_of_adapters
from core.run.run import STOPPED, Run
from core.sampler import SamplingConfig
from envs.own.written import DataConfig, read_written
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, by_role, check_files, resolve_held_out
from models.checkpoint import load_policy
from models.conversations import Conversation, check_rows, describe_prompts, encode_rows
from models.memory import BETWEEN, ELSEWHERE, MemoryConfig
from models.optimizers import OptimizerConfig, describe_optimizer
from models.state import TrainState
from models.tokenizer import Tokenizer, with_generation, with_training_prompts
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.evaluation.losses import loss_metrics, row_losses
from utils.settings.config import make_config, parse
from utils.settings.errors import counted, refuse, user_errors
from utils.settings.groups import ComputeConfig, EvalConfig, LoraConfig, RunConfig, TrainConfig, UpdateConfig
from utils.settings.options import group, option

LOGGED = ("lr", "grad_norm", "update_norm", "param_norm", "speed/padding")  # metrics of the learner that are logged


@dataclass(frozen=True)
class PlayedConfig(EnvConfig):
    """Environment of the held-out score."""

    env_name: str = ""


@dataclass(frozen=True)
class SftOptimizerConfig(OptimizerConfig):
    """Optimizer of supervised fine-tuning."""

    lr: float = 2e-5
    lr_schedule: str = "linear"


@dataclass(frozen=True)
class SFTConfig(TrainConfig):
    """Supervised fine-tuning."""

    max_steps: int = 0
    num_epochs: int = 3
    test_interval: int = 20
    batch_size: int = option(16, "Rows, or pairs of DPO, in a step; a step is one update", essential=True)
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
        super().__post_init__()
        refuse([
            (self.batch_size < 1, "--batch_size must be at least 1: raise it"),
            (not self.num_epochs and not self.max_steps,
             "--num_epochs 0 and --max_steps 0 set no end of the run: give --num_epochs or --max_steps"),
            (self.run.save_best and not self.env.env_name,
             "--save_best chooses by a held-out score: give --env_name"),
        ])  # fmt: skip

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


class Demonstrations:
    """What core/sft.py learns from: conversations, in which each token of a reply has an advantage of 1."""

    command, example = SFT, "row"  # a step has --batch_size examples
    read = staticmethod(read_written)  # returns the data to train on, and held-out conversations

    def __init__(self, config: "SFTConfig", tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer

    def weigh(self, run: Run, learner: Learner, state: TrainState, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Returns the batch with the advantages by which it is learned, and metrics of it."""
        return batch, {}

    def measure(
        self, learner: Learner, state: TrainState, batch: Batch
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Returns metrics of held-out rows, and the arrays of their losses."""
        logprobs = learner.compute_outputs(learner.policy(state.params), batch).logprobs
        return loss_metrics(logprobs, batch.mask), row_losses(logprobs, batch.mask)


def main(config: SFTConfig, learns_from: type[Demonstrations] = Demonstrations) -> None:
    layout = make_layout(config.devices, config.model_dir)
    data, tests = learns_from.read(config.data)
    limits = config.sampling.num_generation_tokens, config.sampling.force_answer_at
    played = by_role(resolve_held_out(config.env, config.env.env_name, *limits, is_inherited=False))
    if played:
        check_files(config.env, [settings.name for settings in played.values()])
    fingerprints = {"held-out data": fingerprint_rows(tests)} if tests else {}
    run = Run(config, layout, {"env": data} | played, learns_from.command, fingerprints)
    model, base, params, tokenizer = load_policy(
        run.folder.model_dir, config.lora, config.seed, layout, **config.compute.arguments
    )
    method, encode = learns_from(config, tokenizer), partial(encode_rows, tokenizer, **config.data.encoding)
    rows, note = encode(data.name, data.env.conversations)
    notes = check_rows(tokenizer, data.name, data.env.conversations)
    held_out = encode("held out", tests)[0][: config.num_tests] if tests else []
    workers = make_workers(config, played, model, tokenizer, layout, run.folder.path)
    softmax = replace(config, sampling=SamplingConfig(prompt_length=1))  # trained, however replies are sampled
    most_tokens = max(map(len, rows + held_out))
    model.check_positions("a row", most_tokens, "lower --max_length")
    learner, state = make_learner(softmax, model, params, layout, most_tokens - 1, run.log.write_bad_batch, base)
    del params  # the state holds them, and each update replaces them
    workers = {role: worker.with_room(learner.sampling_room, config.batch_size) for role, worker in workers.items()}
    state, progress = run.restore(state)
    run.num_steps = config.num_steps(len(rows))
    prompts = {"tokens of the first rows": fingerprint_tokens([row.tokens for row in rows[:NUM_RENDERED]])}
    saved = with_training_prompts(with_generation(tokenizer, {}), data.env.thinking, "")
    with run.start(model, tokenizer, workers.values(), prompts, saved):  # what it has reached is saved at its end
        steps = f"{counted(run.num_steps, 'step')} of {counted(config.batch_size, method.example)}"
        run.folder.print(f"{run.folder.model_dir}: {model.num_parameters:,} parameters", steps)
        run.folder.print(*run.notes, note, *notes, *learner.notes, describe_optimizer(config.optimizer, state.params))
        for worker in workers.values():
            prompt_notes = describe_prompts(tokenizer, data.env.thinking, worker.env.problem(0).thinking)
            run.folder.print(*worker.notes, *prompt_notes)
        train(config, run, method, workers, learner, rows, held_out, state, progress)


def train(
    config: SFTConfig,
    run: Run,
    method: Demonstrations,
    workers: Mapping[str, RolloutWorker],
    learner: Learner,
    rows: Sequence[Conversation],
    held_out: Sequence[Conversation],
    state: TrainState,
    progress: Progress,
) -> None:
    """Makes an update with each batch of rows; every epoch has them in a new order."""

    def evaluate(state: TrainState, step: int) -> dict[str, float]:
        clock, metrics = time.perf_counter(), {}
        if workers:
            metrics = evaluate_policy(config, run, workers, learner, state, step)
        if held_out:
            found, losses = method.measure(learner, state, make_batch(held_out))
            run.log.write_losses(step, losses)
            metrics |= found
        return metrics | {"times/test": time.perf_counter() - clock} if metrics else {}

    progress = run.begin(progress, state, evaluate)
    num_examples = len(rows) // config.group_size
    while progress.step < run.num_steps and STOPPED not in progress.memory:
        with run.phase("data"):
            end = min(progress.cursor + config.batch_size, config.num_epochs * num_examples or sys.maxsize)
            numbers = task_numbers(config.seed, num_examples, np.arange(progress.cursor, end))
            batch = make_batch([rows[i * config.group_size + k] for i in numbers for k in range(config.group_size)])
        batch, weighed = method.weigh(run, learner, state, batch)
        with run.phase("update"):
            state, update = learner.update(state, batch, progress.step / run.num_steps)
            updated = learner.metrics([update])  # blocks until the update is done
        progress = progress.after_step(end, num_rollouts=0)
        metrics = run.log.times | {name: updated[name] for name in LOGGED} | {"num_rows": len(batch)}
        metrics |= {"data/loss": updated["loss"], "data/entropy": updated["entropy"], "data/epochs": end / num_examples}
        metrics |= weighed | {"speed/tokens_per_second": batch.lengths.sum() / metrics["times/update"]}
        progress = run.end_step(progress, state, metrics, evaluate, progress.step == run.num_steps)
    run.finish(progress, state)


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


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(SFTConfig, sys.argv[1:], __doc__, implied=settings_of_adapters))
