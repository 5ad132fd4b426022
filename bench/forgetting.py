"""Forgetting of two games against KL, after a third game is learned to one held-out score: by RL, and by SFT.

    python bench/forgetting.py --dir runs/forgetting    # 11 runs, about 15 minutes on one core

models/player first learns the calculator: this model is the reference. Then it learns to guess numbers. Each run ends
at the first evaluation that reaches the score. The same command again trains only what is not there.
"""

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import numpy as np
from scipy.stats import spearmanr

from bench.ab import describe_origin
from bench.common import report
from bench.distill import MORE, trained
from core.config import Config
from core.grpo import make_workers, rollout_batch
from core.learner import make_learner
from core.records import Batch
from core.rollout import evaluate
from envs.base import Reply
from envs.settings import resolve_environments
from models.checkpoint import load_model
from models.names import Params
from recipes.games.guess import Guess
from utils.devices.startup import make_layout
from utils.settings.config import parse

OLD = {
    "calculator": "prompt=bare,dialect=python,max_number=50,max_operations=2",
    "tictactoe": "prompt=bare,opponent=minimax,tokens_per_turn=24",
}
RL = {"config": "recipes/games/preset.py", "save_interval": 0}
START = RL | {
    "env_name": "calculator", "test_env_name": "calculator-test", "env_options": OLD["calculator"],
    "num_generation_tokens": 64, "max_steps": 12, "test_interval": 0,
}  # fmt: skip
ENDED = {
    "env_name": "guess", "env_options": "prompt=bare,min_size=16", "num_generation_tokens": 96, "prompt_length": 32,
    "num_eval_tasks": 256, "num_eval_samples": 1, "stop_at": "test_env/correct_answer>=0.9", "save_interval": 0,
    "lr_schedule": "constant", "weight_decay": 0,
}  # fmt: skip
SFT = ENDED | {"num_epochs": 0, "max_steps": 240, "test_interval": 5, "batch_size": 32, "test_fraction": 0}
RL |= ENDED | {"max_steps": 40, "test_interval": 2, "kl_coef": 1e-9}  # logs kl
WRITTEN = {  # games for SFT: the form of a turn, what is added before the middle is rounded down, and the rates
    "SFT-lower": ("{low}-{high}:{middle}", 0, (1e-4, 3e-4, 1e-3)),
    "SFT-upper": ("{low}-{high}:{middle}", 1, (3e-4, 1e-3)),
    "SFT-twice": ("{low}-{high}:{middle}:{middle}", 0, (2e-3, 3e-3)),
}
NUM_TOKENS = 256  # limit of a game when models are compared
FEW = {"num_eval_tasks": 4, "max_steps": 1}
SHORT = {"grpo": FEW | {"groups_per_batch": 2, "group_size": 2, "ppo_minibatch": 0}, "sft": FEW | {"batch_size": 4}}


def write_games(file: Path, form: str, added: int) -> None:
    """Writes games in which each guess is the middle of the numbers that are left: they find all numbers."""
    env = Guess(prompt="bare", min_size=16)
    with file.open("w") as out:
        for problem in map(env.problem, range(2000)):
            messages, episode, step = list(problem.messages), env.episode(problem, seed=0), None
            while step is None or not step.done:
                middle = (episode.low + episode.high + added) // 2
                turn = form.format(low=episode.low, high=episode.high, middle=middle)
                step = episode.act(Reply(turn))
                messages += [{"role": "assistant", "content": turn}, *step.messages]
            out.write(json.dumps({"messages": messages}) + "\n")


def train_all(folder: Path, seed: int) -> dict[tuple[str, str], Path]:
    """Returns the models by how they were trained and with which rate; the first is the reference."""
    start = trained(folder / f"start_{seed}", "grpo", START | {"seed": seed})
    models, arms = {("before", ""): start}, {"RL": ((5e-4, 1e-3, 2e-3), "grpo", RL)}
    for arm, (form, added, rates) in WRITTEN.items():
        data = folder / f"{arm}.jsonl"
        write_games(data, form, added)
        arms[arm] = rates, "sft", SFT | {"data": data}
    for arm, (rates, command, own) in arms.items():
        for rate in rates:
            options = own | {"lr": rate, "seed": seed, "model_dir": start}
            models[arm, f"{rate:.0e}"] = trained(folder / f"{arm}_{rate:.0e}_{seed}", command, options)
    return models


class Measure:
    """Plays held-out problems of all games, and compares policies with the reference on those of the new game."""

    def __init__(self, reference: Path, num_tasks: int):
        tests = ",".join(["guess-test", *(f"{name}({options})" for name, options in OLD.items())])
        options = RL | {"model_dir": reference, "test_env_name": tests, "num_generation_tokens": NUM_TOKENS}
        self.config = config = parse(Config, [f"--{name}={x}" for name, x in options.items()])
        self.num_tasks, self.layout = num_tasks, make_layout(config.devices, config.model_dir)
        model, self.reference, tokenizer = load_model(reference, self.layout)
        played = resolve_environments(config.env, config.held_out, config.sampling)
        _, *workers = make_workers(config, played, model, tokenizer, self.layout, reference).values()
        self.workers = dict(zip(("guess", *OLD), workers, strict=True))
        self.learner, _ = make_learner(config, model, self.reference, self.layout, NUM_TOKENS)
        self.rows = self.play(self.reference)[1]

    def play(self, params: Params) -> tuple[dict[str, dict[str, float]], Batch]:
        """Returns the scores of each game, and the rows of the new one."""
        played = {name: evaluate(worker, params, self.num_tasks, 1) for name, worker in self.workers.items()}
        return {name: scores for name, (scores, *_) in played.items()}, rollout_batch(played["guess"][1], self.config)

    def kl(self, rows: Batch, params: Params) -> float:
        """Returns k3 of the KL divergence of the policy that sampled these rows from another one, nats per token."""
        x = (np.float64(rows.sample_logprobs) - self.learner.compute_outputs(params, rows).logprobs)[rows.mask]
        return float(np.mean(np.exp(-x) + x - 1))

    def point(self, folder: Path) -> dict[str, float]:
        """Returns a model's scores, and both KL divergences."""
        params = load_model(folder, self.layout)[1]
        scores, rows = self.play(params)
        found = {"kl": self.kl(rows, self.reference), "kl_of_reference": self.kl(self.rows, params)}
        for end in ("", "_low", "_high"):
            found |= {f"{name}{end}": x[f"correct_answer{end}"] for name, x in scores.items()}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/forgetting"), help="folder of the runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of all runs")
    parser.add_argument("--short", action="store_true", help="one small step of each run, to try the command")
    options = parser.parse_args()
    MORE.update(SHORT if options.short else {})
    models = train_all(options.dir.resolve(), options.seed)
    measure = Measure(models["before", ""], 8 if options.short else 512)
    points = {key: measure.point(model) for key, model in models.items()}
    rows = []
    for key, x in points.items():
        scores = [f"{x[name]:.3f} [{x[f'{name}_low']:.3f}, {x[f'{name}_high']:.3f}]" for name in measure.workers]
        rows.append([*key, models[key].name, *scores, f"{x['kl']:.4f}", f"{x['kl_of_reference']:.4f}"])
    machine = describe_origin([model.parent for model in models.values()])
    columns = "trained by", "rate", "ended", *measure.workers, "KL(policy, reference)", "KL(reference, policy)"
    report("Held-out scores with 95% intervals", columns, rows, machine)
    trained, rows = list(points.values())[1:], []
    for game in OLD:
        found = [spearmanr([x[kl] for x in trained], [-x[game] for x in trained]) for kl in ("kl", "kl_of_reference")]
        rows.append([game, *(f"{x.statistic:+.2f} (p = {x.pvalue:.3f})" for x in found)])
    report("Rank correlation of what is forgotten with", ("game", *columns[-2:]), rows, machine)


if __name__ == "__main__":
    main()
