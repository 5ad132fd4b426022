"""Groups of options, apart from the files that read them, which import much."""

from dataclasses import dataclass

from utils.settings.errors import UserError, check_installed, refuse
from utils.settings.options import option

SELF, SIBLING = "self", "sibling"
SAMPLED = "sampled"
BETAS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}  # by --distill: see `divergence` of core/terms/distill.py


@dataclass(frozen=True)
class ModelConfig:
    """Model."""

    model_dir: str = option(
        "models/tiny",
        "Model: Hugging Face folder, hub id, or run folder (its last step; core/eval.py: all of its steps). "
        "core/eval.py and extras/chat_web.py take several, separated by commas",
        essential=True,
    )
    seed: int = option(0, "Seed of sampling, of the order of problems or rows, and of new adapters")


@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    """Length of training."""

    max_steps: int = option(10000, "Limit on steps, a batch each; 0: no limit (SFT, DPO only)", essential=True)
    num_epochs: int = option(
        0, "Limit on passes over the problems or rows, if reached before --max_steps; 0: no limit"
    )
    test_interval: int = option(
        10,
        "Steps between held-out evaluations, and between example completions on the terminal; 0: only before and "
        "after training",
        resumable=True,
    )

    def __post_init__(self):
        if min(self.max_steps, self.num_epochs, self.test_interval, self.seed) < 0:
            raise UserError(
                "--max_steps, --num_epochs, --test_interval and --seed must not be negative: raise the one that is"
            )


@dataclass(frozen=True)
class UpdateConfig:
    """Batch and updates."""

    groups_per_batch: int = option(256, "Groups of rollouts in the batch of a step", essential=True)
    group_size: int = option(8, "Rollouts of each prompt, which form a group", essential=True)
    max_resampling: float = option(
        4.0,
        "Limit on the groups sampled in a step, as a multiple of --groups_per_batch; groups without signal count too",
    )
    task_sampling: str = option(
        "uniform",
        "Choice of the problems to train on; uniform: all alike; bins: more often those bins of the environment whose "
        "groups are likely to have signal, by Thompson sampling of their pass rates",
        ["uniform", "bins"],
    )
    ppo_minibatch: int = option(64, "Rollouts of one optimizer step; 0: the whole batch")
    ppo_epochs: int = option(1, "Passes of the optimizer over the batch of a step (epochs)")
    do_inference_logprobs: bool = option(
        False,
        "Use the sampler's log-probabilities as the old ones, instead of computing them with the training graph",
    )

    def __post_init__(self):
        for name in ("groups_per_batch", "group_size", "max_resampling", "ppo_epochs"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1: raise it")
        if self.ppo_minibatch < 0:
            raise UserError("--ppo_minibatch must not be negative: raise it, or give 0 for the whole batch")

    @property
    def max_groups(self) -> int:
        """Groups to sample in a step at most."""
        return int(self.groups_per_batch * self.max_resampling)


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation."""

    num_eval_tasks: int = option(
        -1,
        "Problems in an evaluation, the first of the split; 0: all; -1: as the environment sets it (512; gsm8k: all)",
    )
    num_eval_samples: int = option(
        1, "Completions of each problem in an evaluation; it computes pass@k and best-of-n up to this number"
    )

    def __post_init__(self):
        if self.num_eval_tasks < -1 or self.num_eval_samples < 1:
            raise UserError(
                "--num_eval_tasks must be at least -1, and --num_eval_samples at least 1: raise the one that is lower"
            )


@dataclass(frozen=True)
class ComputeConfig:
    """Model computation."""

    dtype: str = option(
        "",
        "Data type of matrix products; empty: bfloat16, but float32 on a CPU or a GPU before Ampere",
        ["", "bfloat16", "float32"],
    )
    kv_dtype: str = option(
        "",
        "Data type of the KV cache; int8: about half the memory and traffic, but the sampler's probabilities differ a "
        "little from the trainer's (see --importance_correction); empty: as --dtype",
        ["", "int8"],
    )

    @property
    def arguments(self) -> dict[str, bool | str]:
        """Returns the arguments of `load_model` that these settings are."""
        return {"dtype": self.dtype, "kv_dtype": self.kv_dtype}


@dataclass(frozen=True)
class SinkConfig:
    """Metrics besides metrics.jsonl."""

    wandb_project: str = option(
        "",
        "Weights & Biases project; empty: lmpo. A run is logged there if a --wandb option is given, after `wandb "
        "login`, or if WANDB_API_KEY is set; WANDB_MODE=disabled turns logging off",
        resumable=True,
    )
    wandb_name: str = option("", "Name of the run at Weights & Biases; empty: the name of its folder", resumable=True)
    wandb_group: str = option("", "Group of the run at Weights & Biases; empty: WANDB_RUN_GROUP", resumable=True)
    tensorboard: bool = option(False, "Write TensorBoard event files to <save_dir>/tensorboard", resumable=True)

    def __post_init__(self):
        if self.tensorboard:
            check_installed("tensorboardX", "--tensorboard", "tensorboardX")


@dataclass(frozen=True)
class RunConfig(SinkConfig):
    """Run folder and logging."""

    save_dir: str = option(
        "",
        "Run folder: a local path, gs://... or s3://...; a run in it is resumed; empty: runs/<environment>-<time>",
        resumable=True,
        essential=True,
    )
    resume: str = option(
        "auto",
        "What to do with a run in --save_dir; auto: resume it, unless an option that changes its results differs; "
        "force: resume it in any case; never: end with an error",
        ["auto", "force", "never"],
        resumable=True,
    )
    save_interval: int = option(
        20, "Steps between two checkpoints (model and training state); 0: only one at the end", resumable=True
    )
    keep: int = option(
        0, "Number of saved models stepN/ to keep, the last ones; best/ always stays; 0: all", resumable=True
    )
    save_best: bool = option(
        False,
        "Copy the model with the best held-out return so far, step 0 included, to <save_dir>/best",
        resumable=True,
    )
    stop_at: str = option(
        "",
        "Rules that end the run early, separated by commas: METRIC>=NUMBER (also <=, >, <), or STEP: METRIC<NUMBER, "
        "which holds from that step on. The model with the best held-out return is kept, as with --save_best. Empty: "
        "none",
        resumable=True,
    )
    save_rollouts: str = option(
        "sample",
        "Rollouts written at each step; sample: two groups; all: all groups, with token ids, masks and "
        "returns; none: none",
        ["all", "sample", "none"],
        resumable=True,
    )
    profile: bool = option(
        False, "Write a jax.profiler trace of the run's third step to <save_dir>/profile", resumable=True
    )

    def __post_init__(self):
        super().__post_init__()
        if min(self.save_interval, self.keep) < 0:
            raise UserError("--save_interval and --keep must not be negative: raise the one that is")


@dataclass(frozen=True)
class LoraConfig:
    """Adapters (LoRA)."""

    lora_rank: int = option(
        0,
        "Rank of LoRA adapters, trained while the model's own weights stay frozen; 0: train all parameters. For RL "
        "ranks 1 to 32 suffice, with about 10 times the --lr. If --model_dir holds adapters, their rank is used",
        essential=True,
    )
    lora_alpha: float = option(
        32.0,
        "Scale alpha of the adapters; their output is multiplied by alpha / rank. If --model_dir holds adapters, the "
        "alpha saved with them is used",
    )
    lora_merge: str = option(
        "auto",
        "Weights that sample; always: a copy of the base with the adapters added, made once a step; never: base and "
        "adapters, computed side by side for each token; auto: a copy if memory has room for it",
        ["auto", "always", "never"],
    )
    base_dtype: str = option(
        "",
        "Data type of the frozen weights below adapters; int8: with a scale for each output channel, in sampling and "
        "updates alike; empty: as --dtype",
        ["", "int8"],
    )

    def __post_init__(self):
        if self.lora_rank < 0 or self.lora_alpha <= 0:
            raise UserError(
                "--lora_rank must not be negative, and --lora_alpha must be above 0: raise the one that is lower"
            )
        if self.base_dtype and not self.lora_rank:
            raise UserError(f"--base_dtype {self.base_dtype} is for weights that are not trained: give --lora_rank")
        if self.base_dtype and self.lora_merge == "always":
            raise UserError(
                "--base_dtype int8 cannot hold the sum that --lora_merge always makes: leave one of the two out"
            )


@dataclass(frozen=True)
class DistillConfig:
    """Distillation."""

    teacher: str = option(
        "",
        "Teacher model q; the policy p learns q's next-token distributions on p's own completions. A Hugging Face "
        "folder, hub id, run folder (its last step) or adapter folder; self: the policy with --teacher_prefix, or "
        "averaged (--teacher_decay); empty: none",
    )
    distill: str = option(
        "reverse",
        "Loss of --teacher, over the whole vocabulary; reverse: KL(p || q); forward: KL(q || p); jsd: the mean of "
        "KL(p || m) and KL(q || m), m = (p + q) / 2. sampled: no loss of its own, but log q - log p of the sampled "
        "tokens is added to their advantages",
        [*BETAS, SAMPLED],
    )
    distill_coef: float = option(
        1.0, "Coefficient of the divergence in the loss; with --distill sampled, of the addition to advantages"
    )
    teacher_prefix: str = option(
        "",
        "System message before the prompt that only the teacher reads: a text, or @FILE with the text; sibling: "
        "another completion of the group whose reward is 1 or more; empty: none",
    )
    teacher_decay: float = option(
        0.0,
        "Decay per step of the average of policies that --teacher self uses; 0: no average, the policy of each step",
    )


def check_distillation(config: DistillConfig, advantage: str, group_size: int) -> None:
    """Raises UserError for options of distillation that contradict each other or the advantage."""
    options = [name for name, value in vars(config).items() if value != getattr(type(config), name)]
    is_self = config.teacher == "self"
    refuse([
        (not config.teacher and advantage == "none",
         "--advantage none learns nothing without --teacher: give --teacher, or another advantage"),
        (not config.teacher and options != [],
         f"--{' --'.join(options)} has no effect without --teacher: give --teacher, or leave it out"),
        (config.distill_coef <= 0, f"--distill_coef {config.distill_coef} must be above 0: raise it"),
        (not 0 <= config.teacher_decay < 1,
         f"--teacher_decay {config.teacher_decay} must be from 0 to below 1: correct it"),
        (config.teacher_decay > 0 and not is_self,
         "--teacher_decay averages the policies of --teacher self: give --teacher self, or leave it out"),
        (is_self and not config.teacher_prefix and not config.teacher_decay,
         "--teacher self is the policy itself and teaches nothing new: give it another prompt by --teacher_prefix, or "
         "--teacher_decay"),
        (config.teacher_prefix == "sibling" and group_size < 2,
         "--teacher_prefix sibling shows another completion of the group: raise --group_size above 1"),
        (config.teacher != "" and advantage == "best_k",
         "--advantage best_k drops the other completions, which --teacher is to teach: choose another advantage"),
    ])  # fmt: skip
