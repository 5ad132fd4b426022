"""Settings of a training run: groups, each declared by the file that reads it, and the options of the loop itself."""

from dataclasses import dataclass

from core.advantages import ObjectiveConfig
from core.sampler import SamplingConfig
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, HeldOutConfig
from models.lora import LoraConfig
from models.memory import BESIDE, BETWEEN, ELSEWHERE, MemoryConfig
from models.optimizers import OptimizerConfig
from utils.devices.startup import TrainDeviceConfig
from utils.settings.errors import UserError
from utils.settings.groups import ComputeConfig, EvalConfig, RunConfig, UpdateConfig
from utils.settings.options import group, option


@dataclass(frozen=True)
class Config:
    """The loop."""

    model_dir: str = option(
        "models/tiny", "Model to train: Hugging Face folder, hub id, or run folder (its last step)", essential=True
    )
    seed: int = option(0, "Seed of the order of the tasks and of sampling")
    max_steps: int = option(
        10000, "Steps of the run; each collects a batch of rollouts and updates the policy on it", essential=True
    )
    num_epochs: int = option(
        0, "Passes over the environment's problems after which the run ends, if before --max_steps; 0: no limit"
    )
    ahead: int = option(
        0,
        "Steps that rollouts are drawn ahead; 1: the next step is sampled while this one updates the policy (weights "
        "are one step old, and the sampler's log-probabilities are the old ones, unless --importance_correction weighs "
        "by them); 0: rollouts are the current policy's",
    )
    precompile: bool = option(
        False,
        "Compilation of all programs, for all shapes of rows, before the first step; 0: when a shape first occurs",
        resumable=True,
    )
    env: EnvConfig = group(EnvConfig)
    held_out: HeldOutConfig = group(HeldOutConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    rewards: RewardConfig = group(RewardConfig)
    eval: EvalConfig = group(EvalConfig)
    update: UpdateConfig = group(UpdateConfig)
    objective: ObjectiveConfig = group(ObjectiveConfig)
    optimizer: OptimizerConfig = group(OptimizerConfig)
    lora: LoraConfig = group(LoraConfig)
    memory: MemoryConfig = group(MemoryConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: TrainDeviceConfig = group(TrainDeviceConfig)
    run: RunConfig = group(RunConfig)

    def __post_init__(self):
        for is_wrong, message in self.mistakes():
            if is_wrong:
                raise UserError(message)

    def mistakes(self) -> list[tuple[bool, str]]:
        """Returns what settings of several groups may get wrong together, and what to do about it."""
        update, objective, sampling, kv_dtype = self.update, self.objective, self.sampling, self.compute.kv_dtype
        is_uncorrected = self.ahead > 0 and not self.is_corrected
        return [
            (self.max_steps < 1 or min(self.num_epochs, self.seed) < 0,
             "--max_steps must be at least 1, --num_epochs and --seed must not be negative"),
            (objective.is_group_relative and update.group_size < 2,
             f"--advantage {objective.advantage} compares rollouts of a group: raise --group_size above 1"),
            (objective.advantage == "best_k" and objective.best_k > update.group_size,
             f"--best_k {objective.best_k} is more than the --group_size of {update.group_size}"),
            (self.batch_size % self.minibatch_size > 0,
             f"--ppo_minibatch {update.ppo_minibatch} does not divide the {self.batch_size} rollouts of a step, "
             "--groups_per_batch x --group_size (--best_k with that advantage): give a divisor, or 0 for one update"),
            (self.lora.lora_rank > 0 and objective.has_critic,
             "--advantage gae trains a critic, which --lora_rank does not support: drop one"),
            (self.run.save_best and not self.held_out.test_env_name,
             "--save_best needs held-out scores: give --test_env_name"),
            (sampling.temperature == 0,
             "--temperature 0 always draws the same completion: training needs one above 0"),
            (self.precompile and sampling.num_speculative_tokens > 0,
             "--precompile does not know the programs of --num_speculative_tokens: drop one"),
            (update.do_inference_logprobs and self.is_corrected,
             "--do_inference_logprobs leaves --importance_correction nothing to correct: drop one"),
            (update.do_inference_logprobs and objective.do_mask_inference_ratio,
             "--do_inference_logprobs leaves --do_mask_inference_ratio nothing to mask: drop one"),
            (kv_dtype != "" and not self.is_corrected and objective.objective != "dppo",
             f"--kv_dtype {kv_dtype} draws from probabilities that differ from those that are trained: correct for "
             "it by --importance_correction truncate, or take --objective dppo"),
            (self.ahead not in (0, 1), f"--ahead {self.ahead} is not supported: 0 or 1"),
            (self.devices.rollout_devices > 0 and not self.ahead,
             "--rollout_devices are for rollouts that are drawn while others train: give --ahead 1, or leave it out"),
            (is_uncorrected and objective.do_mask_inference_ratio,
             "--ahead 1 takes the sampler's log-probabilities as the old ones, so that --do_mask_inference_ratio "
             "has no effect: add --importance_correction truncate, or leave it out"),
            (is_uncorrected and objective.objective == "reinforce",
             "--ahead 1 draws by weights that are a step old, which --objective reinforce does not account for: add "
             "--importance_correction truncate, or take another objective"),
        ]  # fmt: skip

    @property
    def is_corrected(self) -> bool:
        """True if the loss weighs tokens for the difference between the sampler's probabilities and the old ones."""
        return self.objective.importance_correction != "none"

    @property
    def trusts_sampler(self) -> bool:
        """True if old log-probabilities are the sampler's: as asked for, or of rollouts ahead that nothing corrects."""
        return self.update.do_inference_logprobs or (bool(self.ahead) and not self.is_corrected)

    @property
    def batch_size(self) -> int:
        """Rollouts to learn from in a step."""
        is_best_k = self.objective.advantage == "best_k"
        rows_per_group = self.objective.best_k if is_best_k else self.update.group_size
        return self.update.groups_per_batch * rows_per_group

    @property
    def minibatch_size(self) -> int:
        """Rollouts of an optimiser step."""
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
