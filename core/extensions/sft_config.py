"""Settings of core/sft.py: its own options, and the groups that it shares with core/grpo.py."""

import math
from dataclasses import dataclass

from core.advantages import ObjectiveConfig
from core.sampler import SamplingConfig
from envs.own.written import DataConfig
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig
from models.lora import LoraConfig
from models.memory import BETWEEN, ELSEWHERE, MemoryConfig
from models.optimizers import OptimizerConfig
from utils.devices.startup import DeviceConfig
from utils.settings.errors import UserError
from utils.settings.groups import ComputeConfig, EvalConfig, RunConfig, UpdateConfig
from utils.settings.options import group, option


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

    update, updates_per_step, trusts_sampler = UpdateConfig(), 1, False  # for the learner
    objective = ObjectiveConfig(objective="reinforce", advantage="reinforce", entropy_coef=0.0)

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
        return {-1: 512, 0: None}.get(self.eval.num_eval_tasks, self.eval.num_eval_tasks)

    @property
    def minibatch_size(self) -> int:
        return self.batch_size

    def num_steps(self, num_rows: int) -> int:
        """Returns the steps of a run on this many rows."""
        by_epochs = -(-self.num_epochs * num_rows // self.batch_size) or math.inf
        return min(by_epochs, self.max_steps or by_epochs)

    @property
    def place_of_sampling(self) -> str:
        return BETWEEN if self.env.env_name else ELSEWHERE
