"""Notes that a run prints at its start: loss and advantage as resolved, optimizer, adapters."""

from pathlib import Path

from core.advantages import ObjectiveConfig
from core.config import Config
from core.learner import Learner
from core.rollout import RolloutWorker
from envs.scoring.shaping import reward_names
from models.architecture import Decoder
from models.names import Adapters, Params
from models.optimizers import describe_optimizer
from utils.settings.config import changed_options, to_dict
from utils.settings.errors import UserError
from utils.settings.presets import TINY

FULL_RATES = 2e-6  # learning rates of full training are up to this; those of adapters are about 10 times as high
NAMES = ("loss_normalization", "objective", "advantage")


def training_notes(config: Config, learner: Learner, params: Params | Adapters, worker: RolloutWorker) -> list[str]:
    """Returns a line for each decision about memory, loss, optimizer and rollouts.

    Raises: UserError for parts of the reward that are not there.
    """
    check_parts(config, worker)
    notes = [
        *learner.notes,
        warn_of_prompts(config.model_dir, worker),
        describe_objective(config.objective),
        describe_optimizer(config.optimizer, params),
        config.sampling.distribution.describe(),
        describe_adapters(config, learner.model) if learner.base else "",
    ]
    if config.ahead:
        from core.extensions.ahead import describe_ahead

        notes += describe_ahead(config, learner, worker.layout)
    return list(filter(None, notes))


def describe_objective(config: ObjectiveConfig) -> str:
    """Returns loss and advantage in one line, and the options of both that do not have their defaults."""
    settings = to_dict(config)
    changed = [f"{name} {settings[name]}" for name in changed_options(ObjectiveConfig, settings) if name not in NAMES]
    options = f" ({', '.join(changed)})" if changed else ""
    normalization, objective, advantage = map(settings.get, NAMES)
    return f"minimize {normalization} of {objective}; A = {advantage}{options}"


def check_parts(config: Config, worker: RolloutWorker) -> None:
    """Raises UserError for a part of the reward that is asked for and no reward has, by replies to first problems."""
    weights = config.objective.parts.weights
    asked = {name: f"--reward_parts {name}={weight:g}" for name, weight in weights.items()}
    if config.rewards.length_reward == "cosine":
        asked.setdefault("correct_answer", "--length_reward cosine, which pays by correct_answer")
    parts = worker.scorer.parts
    found = reward_names(parts, worker.env)
    found |= {"length_reward"} if config.rewards.length_reward else set()
    for name, option in asked.items():
        if parts and not worker.env.rollouts and name not in found:  # a program names its own
            raise UserError(
                f"{option}: no reward of {worker.name} has this part: name some of {', '.join(sorted(found))}"
            )


def warn_of_prompts(model_dir: str, worker: RolloutWorker) -> str:
    """Returns a warning if models/tiny gets prompts that it cannot read; or nothing."""
    text = str(worker.env.problem(0).messages[-1]["content"])
    if Path(model_dir) != Path(TINY) or worker.env.rollouts or not text or text.startswith("Use "):
        return ""
    return f"warning: {TINY} reads only prompts such as 'Use 3 4 5 to make 6.': give a --model_dir that reads these"


def describe_adapters(config: Config, model: Decoder) -> str:
    """Returns in one line how adapters are sampled, and whether the learning rate fits them."""
    lr = config.optimizer.lr
    sampled = "from a copy with them added" if model.merges_adapters else "beside the base"
    dtype = model.base_dtype or model.dtype
    sizes = f"rank {model.lora_rank} and alpha {model.lora_alpha:g}"
    text = f"adapters of {sizes} over a base in {dtype}, sampled {sampled}"
    if lr <= FULL_RATES:
        text += f"; --lr {lr:g} fits full training: adapters take about 10 times as much"
    return text
