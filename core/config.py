"""Settings of a training run: groups, each declared by the file that reads it, and the options of the loop itself."""

from dataclasses import dataclass

from core.advantages import ObjectiveConfig
from core.extensions.checks import check_combinations
from core.sampler import SamplingConfig
from core.terms.distill import DistillConfig
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, HeldOutConfig
from models.lora import LoraConfig
from models.memory import BESIDE, BETWEEN, ELSEWHERE, MemoryConfig
from models.optimizers import OptimizerConfig
from utils.devices.startup import TrainDeviceConfig
from utils.settings.groups import ComputeConfig, EvalConfig, RunConfig, UpdateConfig
from utils.settings.options import group, option


@dataclass(frozen=True)
class Config:
    """The loop."""

    model_dir: str = option(
        "models/tiny", "Model to train: Hugging Face folder, hub id, or run folder (its last step)", essential=True
    )
    seed: int = option(0, "Seed of the task order and of sampling")
    max_steps: int = option(
        10000, "Number of steps; each samples a batch of rollouts and updates the policy on it", essential=True
    )
    num_epochs: int = option(
        0, "Limit on passes over the environment's problems, if reached before --max_steps; 0: no limit"
    )
    ahead: int = option(
        0,
        "Steps by which sampling is ahead of training; 1: sample the next step's rollouts during this step's updates, "
        "with weights one step old; 0: sample with the current policy. With 1, old log-probabilities are the "
        "sampler's, unless --importance_correction is set",
    )
    env: EnvConfig = group(EnvConfig)
    held_out: HeldOutConfig = group(HeldOutConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    rewards: RewardConfig = group(RewardConfig)
    eval: EvalConfig = group(EvalConfig)
    update: UpdateConfig = group(UpdateConfig)
    objective: ObjectiveConfig = group(ObjectiveConfig)
    distill: DistillConfig = group(DistillConfig)
    optimizer: OptimizerConfig = group(OptimizerConfig)
    lora: LoraConfig = group(LoraConfig)
    memory: MemoryConfig = group(MemoryConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: TrainDeviceConfig = group(TrainDeviceConfig)
    run: RunConfig = group(RunConfig)

    def __post_init__(self):
        check_combinations(self)

    @property
    def trusts_sampler(self) -> bool:
        """True if old log-probabilities are the sampler's: as asked for, or of rollouts ahead that nothing corrects."""
        return self.update.do_inference_logprobs or (bool(self.ahead) and not self.objective.is_corrected)

    @property
    def batch_size(self) -> int:
        """Rollouts to learn from in a step."""
        is_best_k = self.objective.advantage == "best_k"
        rows_per_group = self.objective.best_k if is_best_k else self.update.group_size
        return self.update.groups_per_batch * rows_per_group

    @property
    def minibatch_size(self) -> int:
        """Rollouts of an optimizer step."""
        return self.update.ppo_minibatch or self.batch_size

    @property
    def updates_per_step(self) -> int:
        return self.update.ppo_epochs * (self.batch_size // self.minibatch_size)

    @property
    def place_of_sampling(self) -> str:
        """Returns where rollouts are drawn, as the plan of the devices' memory names it."""
        if not self.ahead:
            return BETWEEN
        return ELSEWHERE if self.devices.rollout_devices else BESIDE
