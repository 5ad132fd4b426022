"""models/tiny learns from its own RL'd self: RL, distillation, both, and SFT on what the teacher writes; three seeds.

    python bench/distill.py --dir runs/distill    # 22 runs of the demo's task, and their evaluations: about 25 minutes
    python bench/distill.py --only trl            # divergences and gradients beside TRL's (needs it, torch and JAX)

--only map, contrast, variance or draw is a part of the first. Runs that are done are not repeated.

Arms differ in what teaches and in their samples: RL has the demo's 24 steps of 256 completions, and its first seed is
the teacher. Distillation alone has 16 steps of 64 prompts, one completion of each.

The contrast: a model that searches long under a rule, a system message, and as before without it, teaches itself
without the message, by the rule or by a sibling's success as what the teacher alone reads.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bench.common import ROOT, run_command, train
from core.terms.distill import divergence
from extras.plots import make_figure
from models.checkpoint import load_model
from models.decoder import logits
from utils.metrics.curves import COLORS, Curves, read_metrics

TINY = "models/tiny"
SEEDS = (0, 1, 2)
DEMO = runpy.run_path(str(ROOT / "configs" / "demo.py"))["get_config"]()
PLAYED = {name: DEMO[name] for name in ("env_options", "num_generation_tokens", "prompt_length")}
NUM_WRITTEN = 1024  # completions of the teacher that SFT sees: as many as distillation draws
FEW = {"groups_per_batch": 64, "group_size": 1, "ppo_minibatch": 32, "advantage": "none", "max_steps": 16}
HELD_OUT = {"num_eval_tasks": 128, "num_eval_samples": 2, "test_interval": 8, "save_interval": 0}
MANY = {"env_name": "countdown-test", "num_eval_tasks": 128, "num_eval_samples": 8}
ARMS = {  # options besides those of the demo
    "RL": {},
    "reverse": FEW,
    "sampled": FEW | {"distill": "sampled"},
    "both": {"max_steps": 8},
}
SFT = PLAYED | HELD_OUT | {
    "env_name": "countdown", "num_epochs": 2, "batch_size": 64, "lr": 6e-4, "test_fraction": 0, "max_length": 256,
}  # fmt: skip
RULE = "Search long."
OWN = FEW | {"teacher": "self", "teacher_decay": 0.95}
CONTRAST = {
    "rule": OWN | {"teacher_prefix": RULE},
    "sibling": OWN | {"teacher_prefix": "sibling", "groups_per_batch": 8, "group_size": 8},
}
ALL_ARMS = (*ARMS, "SFT", *CONTRAST)
SHORT = {  # options of commands
    "grpo": {"groups_per_batch": 4, "group_size": 2, "ppo_minibatch": 0, "max_steps": 2, "num_eval_tasks": 2},
    "sft": {"batch_size": 4, "max_steps": 2, "num_eval_tasks": 2},
    "eval": {"num_eval_tasks": 8},
}
MORE: dict[str, dict[str, object]] = {}  # options of commands besides all others
SCORE, PASS = "correct_answer", "pass@8"


def trained(folder: Path, command: str, options: Mapping[str, object]) -> Path:
    """Returns the model of a run, with the options of all runs of a command."""
    return train(folder, {**options, **MORE.get(command, {})}, command)


def evaluate(model: Path | str, file: Path, options: Mapping[str, object] = MANY) -> dict[str, float]:
    """Returns the scores of a model, which is played unless they are there."""
    if not file.exists():
        played = {**PLAYED, "model_dir": model, "json": file, **options, **MORE.get("eval", {})}
        with file.with_suffix(".log").open("w") as out:
            run_command("core/eval.py", played, out)
    return json.loads(file.read_text())


def written(model: Path | str, file: Path) -> list[list[dict[str, str]]]:
    """Returns conversations: training problems, and a model's replies that come to an end."""
    options = {"env_name": "countdown", "num_eval_tasks": NUM_WRITTEN, "save_samples": file}
    evaluate(model, file.with_suffix(".json"), options)
    conversations = []
    for row in map(json.loads, file.read_text().splitlines()):
        prompt = row["prompt"].partition("user\n")[2].partition("<|im_end|>")[0]
        if (reply := row["completions"][0])["finished"]:
            turns = ("user", prompt), ("assistant", reply["text"])
            conversations.append([{"role": role, "content": text} for role, text in turns])
    return conversations


def write_rows(file: Path, conversations: Sequence[list[dict[str, str]]]) -> None:
    """Writes the data of core/sft.py."""
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))


def prepare(folder: Path) -> Path:
    """Returns the teacher, the first seed of RL; it and models/tiny have been played, and have written."""
    teacher = trained(folder / "RL_0", "grpo", {"config": "configs/demo.py", "seed": 0})
    evaluate(TINY, folder / "base.json")
    long = written(teacher, folder / "written_by_teacher.jsonl")
    short = written(TINY, folder / "written_by_base.jsonl")
    write_rows(folder / "sft.jsonl", long)
    write_rows(folder / "both.jsonl", [[{"role": "system", "content": RULE}, *messages] for messages in long] + short)
    return teacher


def run_map(folder: Path, seeds: Sequence[int], arms: Sequence[str]) -> None:
    """Trains these arms with these seeds, and plays their models."""
    teacher = prepare(folder)
    for seed in seeds:
        for arm, options in ARMS.items():
            if arm not in arms:
                continue
            own = {} if arm == "RL" else HELD_OUT | {"teacher": teacher}
            options = {"config": "configs/demo.py", "seed": seed} | own | options
            evaluate(trained(folder / f"{arm}_{seed}", "grpo", options), folder / f"{arm}_{seed}.json")
        if "SFT" in arms:
            model = trained(folder / f"SFT_{seed}", "sft", SFT | {"data": folder / "sft.jsonl", "seed": seed})
            evaluate(model, folder / f"SFT_{seed}.json")


def run_contrast(folder: Path, seeds: Sequence[int], arms: Sequence[str]) -> None:
    """Trains the model that knows the rule, then what it teaches itself in these arms with these seeds."""
    prepare(folder)
    base = trained(folder / "knows_the_rule", "sft", SFT | {"data": folder / "both.jsonl", "num_epochs": 4})
    evaluate(base, folder / "without.json")
    system = {"env_options": f"{PLAYED['env_options']},system={RULE}", "prompt_length": 64}
    evaluate(base, folder / "with.json", MANY | system)
    for seed in seeds:
        for arm, options in CONTRAST.items():
            if arm not in arms:
                continue
            options = {"config": "configs/demo.py", "seed": seed, "model_dir": base} | HELD_OUT | options
            evaluate(trained(folder / f"{arm}_{seed}", "grpo", options), folder / f"{arm}_{seed}.json")


def scores(folder: Path, arm: str) -> list[dict[str, float]]:
    """Returns the scores of the seeds of an arm that are there."""
    files = [folder / f"{arm}_{seed}.json" for seed in SEEDS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def table(folder: Path) -> str:
    """Returns a row for each arm: the means of its seeds, and their scores."""
    columns = "arm", "completions", "thousand tokens", "minutes", "correct", "of seeds", "pass@8"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    names = {"base": "before", "without": "before, without the rule", "with": "before, with the rule"}
    for name, words in names.items():
        if (folder / f"{name}.json").exists():
            score = json.loads((folder / f"{name}.json").read_text())
            lines.append(f"| {words} | | | | {score[SCORE]:.3f} | | {score[PASS]:.3f} |")
    for arm in ALL_ARMS:
        if not (found := scores(folder, arm)):
            continue
        logs = [read_metrics(folder / f"{arm}_{seed}" / "metrics.jsonl") for seed in SEEDS[: len(found)]]
        spent = [[part[-1] for part in (num_samples(log), num_tokens(log))] for log in logs]
        samples, tokens = np.mean(spent, axis=0)
        minutes = np.mean([log["times/run"][1][-1] for log in logs]) / 60
        of_seeds = ", ".join(f"{score[SCORE]:.3f}" for score in found)
        means = [np.mean([score[name] for score in found]) for name in (SCORE, PASS)]
        lines.append(
            f"| {arm} | {samples:,.0f} | {tokens / 1e3:,.0f} | {minutes:.1f} | **{means[0]:.3f}** | {of_seeds} | "
            f"{means[1]:.3f} |"
        )
    return "\n".join(lines)


def num_samples(log: Curves) -> np.ndarray:
    """Returns the completions drawn until each step; of SFT those it was given."""
    return log["rollout/total_rollouts"][1] if "rollout/total_rollouts" in log else np.array([NUM_WRITTEN])


def num_tokens(log: Curves) -> np.ndarray:
    """Returns the tokens drawn until each step."""
    if "env/length" not in log:
        return np.array([0])
    return np.cumsum(log["env/length"][1] * log["rollout/num_rollouts"][1])


def draw(folder: Path, out: Path) -> None:
    """Draws held-out scores by completions and by tokens drawn: means over seeds, with their range."""
    figure = make_figure(figsize=(12, 4.5))
    panels = figure.subplots(1, 2)
    for arm, color in zip(ARMS, COLORS, strict=False):
        runs = [folder / f"{arm}_{seed}" for seed in SEEDS]
        logs = [read_metrics(run / "metrics.jsonl") for run in runs if list(run.glob("step*"))]
        for panel, amount in zip(panels, (num_samples, num_tokens), strict=True):
            curves = []
            for log in logs:
                steps, held_out = log[f"test_env/{SCORE}"]
                amounts = np.append(0, amount(log))[np.int64(steps)]
                curves.append((amounts, held_out))
            if curves:
                x, y = (np.array(part) for part in zip(*curves, strict=True))
                panel.plot(x.mean(0), y.mean(0), marker="o", color=color, label=f"{arm} ({len(logs)})")
                panel.fill_between(x.mean(0), y.min(0), y.max(0), color=color, alpha=0.15)
    for panel, words in zip(panels, ("completions drawn", "tokens drawn"), strict=True):
        panel.set(xlabel=words, ylabel="correct, held out", ylim=(0.15, None))
        panel.set_xscale("symlog", linthresh=500 if words.startswith("c") else 50_000)
        panel.set_xlim(0, None)
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(out, dpi=100)


def show_variance(folder: Path, *_: Sequence[int | str]) -> None:
    """Prints how far the mean of k sampled gradients is from that of the whole distributions, for the parameters.

    The states are those of 32 completions of models/tiny; each token is drawn anew in each of them.
    """
    teacher = prepare(folder)
    conversations = written(TINY, folder / "written_by_base.jsonl")[:32]
    model, params, tokenizer = load_model(TINY)
    _, params_of_teacher, _ = load_model(teacher)
    prompts = [tokenizer.chat(messages[:1], True) for messages in conversations]
    replies = [tokenizer.encode(messages[1]["content"]) for messages in conversations]
    rows = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[i, : len(row)] = row
        mask[i, len(prompt) - 1 : len(row) - 1] = True  # states from which the completion was drawn
    log_q = jax.nn.log_softmax(logits(model, params_of_teacher, tokens))
    log_p, pull_back = jax.vjp(lambda params: jax.nn.log_softmax(logits(model, params, tokens)), params)
    weights = mask[..., None] / mask.sum()
    log_ratio = log_p - log_q

    @jax.jit
    def gradient(of_logprobs: jax.Array) -> jax.Array:
        (tree,) = pull_back(of_logprobs * weights)
        return ravel_pytree(tree)[0]

    whole = gradient(jnp.exp(log_p) * log_ratio)  # of the KL: the sum over p of a gradient of log p is 0
    key, total, lines = jax.random.key(0), jnp.zeros_like(whole), []
    for k in range(1, 257):
        drawn = jax.random.categorical(jax.random.fold_in(key, k), log_p)
        total += gradient(jax.nn.one_hot(drawn, log_p.shape[-1]) * log_ratio)
        if k & (k - 1) == 0:
            mean = total / k
            cosine = mean @ whole / (jnp.linalg.norm(mean) * jnp.linalg.norm(whole))
            error = jnp.linalg.norm(mean - whole) / jnp.linalg.norm(whole)
            lines.append(f"| {k} | {error:.2f} | {cosine:.2f} |")
    print("| samples of each token | error / gradient | cosine |", "|---|---|---|", *lines, sep="\n")


def compare_with_trl() -> None:
    """Prints the largest differences of values and gradients from TRL's DistillationTrainer."""
    import torch
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    rng = np.random.default_rng(0)
    states = [np.float32(rng.normal(size=(2, 9, width))) for width in (16, 24)]
    heads = [np.float32(rng.normal(size=(50, width))) for width in (16, 24)]
    mask = np.arange(9) < np.array([[9], [5]])
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):

        def loss(state: jax.Array, beta: float = beta) -> jax.Array:
            log_p, log_q = (
                jax.nn.log_softmax((x @ head.T).reshape(-1, 50) / 0.7)
                for x, head in zip((state, states[1]), heads, strict=True)
            )
            return (divergence(log_p, log_q, beta) * mask.ravel()).sum() / mask.sum()

        value, gradient = jax.value_and_grad(loss)(states[0])
        inputs = [torch.tensor(x) for x in (*states, *heads)]
        inputs[0].requires_grad_()
        theirs, *_ = _chunked_divergence_loss(
            *inputs, torch.tensor(mask), beta, num_items_in_batch=int(mask.sum()), temperature=0.7
        )
        theirs.backward()
        difference = np.abs(gradient - inputs[0].grad.numpy()).max() / np.abs(gradient).max()
        print(f"beta {beta:g}: {value:.6f}, TRL {theirs.item():.6f}; gradients differ by {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/distill"), help="folder of all runs")
    parser.add_argument("--only", default="", choices=["", "draw", "variance", "trl", "map", "contrast"])
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--arms", nargs="*", default=ALL_ARMS, choices=ALL_ARMS)
    parser.add_argument("--short", action="store_true", help="two tiny steps of each run, to see that all works")
    args = parser.parse_args()
    MORE.update(SHORT if args.short else {})
    folder = args.dir.resolve()
    steps = {"map": run_map, "contrast": run_contrast, "variance": show_variance}
    for name, step in steps.items():
        if args.only in ("", name):
            step(folder, args.seeds, args.arms)
    if args.only == "trl":
        compare_with_trl()
    if args.only in ("", "draw"):
        draw(folder, folder / "distill.png")
        print(table(folder))


if __name__ == "__main__":
    main()
