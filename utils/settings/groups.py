"""Groups of options, apart from the files that read them, which import much: run folder, sinks, computation."""

from dataclasses import dataclass
from importlib.util import find_spec

from utils.settings.errors import UserError
from utils.settings.options import option


@dataclass(frozen=True)
class ComputeConfig:
    """Model computation."""

    dtype: str = option(
        "", "Data type of matrix multiplications; empty: bfloat16, and float32 on CPU", ["", "bfloat16", "float32"]
    )
    kv_dtype: str = option(
        "",
        "Data type of the KV cache; empty: as --dtype; int8: about half the memory and traffic, but probabilities "
        "that differ a little from the trainer's (see --importance_correction)",
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
        "Project at Weights & Biases, where the run is logged if this or --wandb_name is given, or after `wandb login` "
        "or with WANDB_API_KEY, unless WANDB_MODE is disabled; empty: lmpo",
        resumable=True,
    )
    wandb_name: str = option("", "Name of the run at Weights & Biases and MLflow; empty: its folder's", resumable=True)
    tensorboard: bool = option(False, "TensorBoard event files in <save_dir>/tensorboard", resumable=True)
    mlflow: str = option(
        "",
        "Address of an MLflow store to log to, for example sqlite:///mlflow.db or http://host:5000; empty: none",
        resumable=True,
    )

    def __post_init__(self):
        for flag, package in (("tensorboard", "tensorboardX"), ("mlflow", "mlflow")):
            if getattr(self, flag) and find_spec(package) is None:
                raise UserError(f"--{flag} needs a package that is not installed: `pip install {package}`")


@dataclass(frozen=True)
class RunConfig(SinkConfig):
    """Run folder and logging."""

    save_dir: str = option(
        "",
        "Run folder, local or gs://... or s3://...; a run in it is resumed; empty: runs/<environment>-<time>",
        resumable=True,
        essential=True,
    )
    resume: str = option(
        "auto",
        "Treatment of a run in --save_dir; auto: resumed unless an option that changes its results differs, force: "
        "resumed in any case, never: an error",
        ["auto", "force", "never"],
        resumable=True,
    )
    save_interval: int = option(
        20, "Steps between checkpoints (model and training state); 0: only at the end", resumable=True
    )
    save_best: bool = option(
        False,
        "Copy of the model with the best held-out return so far, in <save_dir>/best; step 0 counts",
        resumable=True,
    )
    save_dtype: str = option(
        "",
        "Data type of the weights in saved models; bfloat16 takes half the space of float32, and rounds; empty: that "
        "of training",
        ["", "float32", "bfloat16", "float16"],
        resumable=True,
    )
    save_rollouts: str = option(
        "sample",
        "Rollouts written at each step; sample: two groups, all: all groups, with token ids, masks and returns",
        ["all", "sample", "none"],
        resumable=True,
    )
    profile: bool = option(False, "jax.profiler trace of the run's third step, in <save_dir>/profile", resumable=True)

    def __post_init__(self):
        super().__post_init__()
        if self.save_interval < 0:
            raise UserError("--save_interval must not be negative")
