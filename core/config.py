"""Settings of a training run: groups, each declared by the file that reads it, and the options of the loop itself."""

from dataclasses import dataclass

from core.advantages import BATCH_ADVANTAGES, ObjectiveConfig
from core.sampler import SamplingConfig
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, HeldOutConfig
from models.memory import BESIDE, BETWEEN, ELSEWHERE, MemoryConfig
from models.optimizers import OptimizerConfig
from utils.devices.startup import DeviceConfig
from utils.settings.errors import refuse
from utils.settings.groups import (
    ComputeConfig,
    DistillConfig,
    EvalConfig,
    LoraConfig,
    RunConfig,
    TrainConfig,
    UpdateConfig,
    check_distillation,
)
from utils.settings.options import group, option


@dataclass(frozen=True)
class Config(TrainConfig):
    """The loop."""

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
    devices: DeviceConfig = group(DeviceConfig)
    run: RunConfig = group(RunConfig)

    samples = True  # False: rollouts are read from files, in recipes/offline

    def __post_init__(self):
        super().__post_init__()
        update, objective, sampling, kv_dtype = self.update, self.objective, self.sampling, self.compute.kv_dtype
        older = self.older_by
        is_uncorrected = older != "" and not objective.corrections.is_corrected
        check_distillation(self.distill, objective.advantage, update.group_size)
        refuse([
            (self.max_steps < 1, "--max_steps must be at least 1: raise it"),
            (objective.advantage not in BATCH_ADVANTAGES and update.group_size < 2,
             f"--advantage {objective.advantage} compares rollouts of a group: raise --group_size above 1"),
            (objective.advantage == "best_k" and objective.best_k > update.group_size,
             f"--best_k {objective.best_k} is more than --group_size {update.group_size}: lower --best_k, or raise "
             "--group_size"),
            (self.batch_size % self.minibatch_size > 0,
             f"--ppo_minibatch {update.ppo_minibatch} does not divide the {self.batch_size} rollouts of a step, which "
             "are --groups_per_batch x --group_size (best_k: x --best_k): give a divisor, or 0 for one update"),
            (self.lora.lora_rank > 0 and objective.has_critic,
             "--advantage gae trains a critic, which --lora_rank does not support: leave out one of the two"),
            (self.run.save_best and not self.held_out.test_env_name,
             "--save_best needs held-out scores: give --test_env_name"),
            (sampling.temperature == 0,
             "--temperature 0 always samples the same completion: give one above 0 for training"),
            (self.distill.teacher != "" and not sampling.distribution.is_whole,
             "--teacher compares whole distributions: leave --top_k, --top_p and --min_p out"),
            (update.do_inference_logprobs and objective.corrections.is_corrected,
             "--do_inference_logprobs leaves --importance_correction nothing to correct: leave out one of the two"),
            (update.do_inference_logprobs and objective.corrections.do_mask_inference_ratio,
             "--do_inference_logprobs leaves --do_mask_inference_ratio nothing to mask: leave out one of the two"),
            (kv_dtype != "" and not objective.corrections.is_corrected and objective.policy.objective != "dppo",
             f"--kv_dtype {kv_dtype} samples from other probabilities than those that are trained: correct for it by "
             "--importance_correction truncate, or use --objective dppo"),
            (self.ahead not in (0, 1), f"--ahead {self.ahead} is not supported: give 0 or 1"),
            (is_uncorrected and objective.corrections.do_mask_inference_ratio,
             f"--do_mask_inference_ratio has no effect with {older}, since old log-probabilities are the sampler's: "
             "add --importance_correction truncate, or leave it out"),
            (is_uncorrected and objective.policy.objective == "reinforce",
             f"{older} trains on rollouts of older weights, which --objective reinforce does not account for: add "
             "--importance_correction truncate, or choose another objective"),
        ])  # fmt: skip

    @property
    def older_by(self) -> str:
        """Returns the option by which rollouts are of older weights than the policy's; empty: they are of its own."""
        return "--ahead 1" if self.ahead else ""

    @property
    def trusts_sampler(self) -> bool:
        """True if old log-probabilities are the sampler's: as asked for, or of older rollouts that nothing corrects."""
        is_older = self.older_by != ""
        return self.update.do_inference_logprobs or (is_older and not self.objective.corrections.is_corrected)

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
        return ELSEWHERE if self.devices.mesh else BESIDE
