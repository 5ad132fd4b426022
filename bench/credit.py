"""Estimators of a turn's advantage beside the exact one, at equal samples, along runs of `guess`.

    python bench/credit.py --dir runs/credit    # three runs of 20 steps and their tables: about 5 minutes on one core

A game has 10 to 15 numbers and 4 turns, so all games of a problem can be listed as a tree. The interval that opens a
reply is written by rule, and the policy chooses the number; numbers below 0.2% are left out. Q, V and Q - V of this
policy are exact, and games are sampled from the tree. Samples are counted in replies. The same command again reads the
runs that have ended.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.special import log_softmax

from bench.common import environment, report
from bench.task_sampling import train
from envs.base import Problem
from models.checkpoint import load_model
from models.decoder import logits
from models.tokenizer import Tokenizer
from recipes.games.guess import Guess
from utils.evaluation.estimates import paired_difference

A, TURNS = 100, 4  # numbers, each one token
ENV = Guess(prompt="bare", max_size=15, max_turns=TURNS)
TRAINED = {
    "config": "recipes/games/preset.py", "env_options": f"prompt=bare,max_size=15,max_turns={TURNS}",
    "lr_schedule": "constant", "max_steps": 20, "save_interval": 10, "test_interval": 20, "num_eval_tasks": 64,
}  # fmt: skip
SMALLEST, ROWS, COLUMNS = 2e-3, 64, 80  # least probability of a number; shape of a forward pass
TITLES = ("estimator", "bias", "deviation", "gradient's bias", "squared error", "cosine, 1 group", "16 groups", "games")
Edges = Int[np.ndarray, "R G K"]  # replies of R groups of G games of K turns: prefix x A + number; -1 behind the end
Credit = Float[np.ndarray, "R G K"]
Returns = Float[np.ndarray, "R G"]


class Tree(NamedTuple):
    """All games of a problem: S prefixes, the first is the prompt, and the A numbers that may follow each."""

    probs: Float[np.ndarray, "S A"]
    rewards: Float[np.ndarray, "S A"]  # return of a game that the number ends
    children: Int[np.ndarray, "S A"]  # prefix behind the number; -1: the game is over
    reached: Float[np.ndarray, "S"]  # probability that a game has the prefix
    intervals: Int[np.ndarray, "S"]  # turn, smallest and largest number left: (turn x A + low) x A + high
    kept: Float[np.ndarray, "S"]  # share of the model's replies that are in the tree

    @property
    def cells(self) -> Int[np.ndarray, "S"]:
        """Returns what the critic sees: the turn and how many numbers are left; all first turns are one cell."""
        turn, low, high = self.intervals // A**2, self.intervals // A % A, self.intervals % A
        return turn * A + np.where(turn, high - low, 0)

    def exact(self) -> tuple[Float[np.ndarray, "S A"], Float[np.ndarray, "S"]]:
        """Returns Q - V of each reply, and V of each prefix."""
        values = np.zeros(len(self.probs))
        for _ in range(TURNS):
            q = np.where(self.children < 0, self.rewards, values[self.children])
            values = (self.probs * q).sum(axis=1)
        return q - values[:, None], values

    def mean(self, x: Float[np.ndarray, "S"]) -> float:
        """Returns the mean over the turns of games."""
        return self.reached @ x / self.reached.sum()

    def play(self, at: Int[np.ndarray, "*n"], rng: np.random.Generator) -> tuple[Edges, Returns]:
        """Samples the rest of a game from each prefix; from a negative one nothing, with return 0."""
        cumulative, at, returns = self.probs.cumsum(axis=1), at.copy(), np.zeros(at.shape)
        edges = np.full((*at.shape, TURNS), -1)
        for turn in range(TURNS):
            on = at >= 0
            now = at[on]
            drawn = rng.random(len(now)) * cumulative[now, -1]
            numbers = (cumulative[now] <= drawn[:, None]).sum(axis=1)
            edges[on, turn] = now * A + numbers
            returns[on] += self.rewards[now, numbers]
            at[on] = self.children[now, numbers]
        return edges, returns


def grow(problem: Problem, tokenizer: Tokenizer, forward: Callable[[np.ndarray], Float[Array, "n T V"]]) -> Tree:
    """Returns the tree of a problem. `forward`: next-token logits of right-padded rows."""
    ids = np.array([tokenizer.encode(str(number)) for number in range(A)])[:, 0]
    nodes, frontier = [], [(problem.messages, ENV.episode(problem, 0), 1.0)]
    for turn in range(TURNS):
        rows, ends = np.zeros((-(-len(frontier) // ROWS) * ROWS, COLUMNS), np.int32), []
        for row, (messages, episode, _) in zip(rows, frontier, strict=False):
            prompt, opening = tokenizer.chat(messages), tokenizer.encode(f"{episode.low}-{episode.high}:")
            ends.append(slice(len(prompt), len(prompt) + len(opening)))
            row[: ends[-1].stop] = prompt + opening
        found = np.concatenate([forward(rows[i : i + ROWS]) for i in range(0, len(rows), ROWS)])
        behind, first = [], len(nodes) + len(frontier)
        for (messages, episode, reached), row, end, x in zip(frontier, rows, ends, found, strict=False):
            logprobs = log_softmax(x[end.start - 1 : end.stop], axis=-1)
            p = np.exp(logprobs[-1, ids], dtype=float)
            p[p < SMALLEST] = 0
            kept = p.sum() * np.exp(logprobs[np.arange(len(row[end])), row[end]].sum())
            p, rewards, children = p / p.sum(), np.zeros(A), np.full(A, -1)
            for number in np.flatnonzero(p):
                after, reply = copy.copy(episode), f"{episode.low}-{episode.high}:{number}"
                step = after.step(reply)
                rewards[number] = step.reward
                if not step.done and turn < TURNS - 1:
                    children[number] = first + len(behind)
                    said = {"role": "assistant", "content": reply}, *step.messages
                    behind.append(([*messages, *said], after, reached * p[number]))
            interval = (turn * A + episode.low) * A + episode.high
            nodes.append((p, rewards, children, reached, interval, kept))
        frontier = behind
    return Tree(*map(np.array, zip(*nodes, strict=True)))


def shared(keys: Edges, returns: Returns) -> tuple[Credit, Credit]:
    """Returns the sum of the returns of the group's games that have this key, and their number."""
    groups = np.arange(len(keys))[:, None, None] * (keys.max() + 2)
    _, places = np.unique(groups + keys + 1, return_inverse=True)
    sums = np.bincount(places.ravel(), np.broadcast_to(returns[..., None], keys.shape).ravel())
    return sums[places].reshape(keys.shape), np.bincount(places.ravel())[places].reshape(keys.shape)


def mean_of_others(sums: Credit, counts: Credit, own_sums: Credit, own_counts: Credit | int) -> Credit:
    """Returns the mean return without the own games; of the turn before, if there are no others at this turn."""
    values = (sums - own_sums) / np.maximum(counts - own_counts, 1)
    for turn in range(1, values.shape[-1]):
        values[..., turn] = np.where((counts > own_counts)[..., turn], values[..., turn], values[..., turn - 1])
    return values


def steps(values: Credit, edges: Edges, returns: Returns) -> Credit:
    """Returns the value of the next prefix, the return behind the last turn, minus the value of the prefix."""
    is_last = np.pad(edges[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1) < 0
    return np.where(is_last, returns[..., None], np.roll(values, -1, axis=-1)) - values


def by_group(edges: Edges, returns: Returns) -> dict[str, Credit]:
    """Returns the advantages that compare the games of a group. Source of TEMPO: arXiv 2509.18314."""
    sums, counts = shared(edges // A, returns)
    to_go, G = returns[..., None], returns.shape[1]
    mean = to_go - to_go.mean(axis=1, keepdims=True)
    return {
        "group mean": mean,
        "leave-one-out": mean * G / (G - 1),
        "prefix tree": to_go - sums / counts,
        "prefix tree, step": steps(sums / counts, edges, returns),
        "TEMPO, not divided": mean + steps(sums / counts, edges, returns),
        "leave-one-out tree": to_go - mean_of_others(sums, counts, to_go, 1),
    }


def by_critic(cells: Int[np.ndarray, "P R G K"], returns: Float[np.ndarray, "P R G"]) -> Float[np.ndarray, "P R G K"]:
    """Returns the mean return by cell, over the games of the batch's other problems. A batch: a group of each."""
    P, R, G, K = cells.shape
    own = [x.reshape(cells.shape) for x in shared(cells.reshape(-1, G, K), returns.reshape(-1, G))]
    batches = cells.swapaxes(0, 1).reshape(R, -1, K), returns.swapaxes(0, 1).reshape(R, -1)
    return mean_of_others(*(x.reshape(R, P, G, K).swapaxes(0, 1) for x in shared(*batches)), *own)


def halves(x: Float[np.ndarray, "R n"]) -> Float[np.ndarray, "2 n"]:
    return np.array([x[::2].sum(axis=0), x[1::2].sum(axis=0)])


def measure(tree: Tree, edges: Edges, credit: Credit, cost: float) -> tuple[float, ...]:
    """Returns squared bias and error of advantages; squared bias and both cosines of the gradient; 1 / cost.

    The gradient is that of a policy with a logit for each interval, turn and number. Its bias is a share of its square;
    its cosines are with the exact one, at the samples of 1 group and of 16. `cost`: samples of a game with its
    branches, in games. Squares of means are products of two halves, so that noise adds nothing to them.
    """
    on, used, exact = edges >= 0, np.flatnonzero(tree.probs), tree.exact()[0].ravel()
    replies, groups, credit = edges[on], np.nonzero(on)[0], np.broadcast_to(credit, edges.shape)[on]
    errors, columns, probs = credit - exact[replies], np.searchsorted(used, replies), tree.probs.ravel()[used]
    weights = tree.reached[used // A] * probs

    def total(x: Float[np.ndarray, "n"], places: Int[np.ndarray, "n"], width: int) -> Float[np.ndarray, "R width"]:
        return np.bincount(groups * width + places, x, len(edges) * width).reshape(-1, width)

    counts, sums = (halves(total(x, columns, len(used))) for x in (np.ones(len(replies)), errors))
    seen = weights * (counts.min(axis=0) > 0)
    bias = seen @ (sums / np.maximum(counts, 1)).prod(axis=0) / seen.sum()

    of_prefixes = total(credit, replies // A, len(tree.probs))
    by_reply = (total(credit, columns, len(used)) - probs * of_prefixes[:, used // A]) / edges.shape[1]
    keys = tree.intervals[used // A] * A + used % A
    order = np.argsort(keys)
    starts = np.unique(keys[order], return_index=True)[1]
    gradients, true = (np.add.reduceat(x[..., order], starts, axis=-1) for x in (by_reply, weights * exact[used]))
    a, b = halves(gradients) * 2 / len(edges)
    noise, length = cost * gradients.var(axis=0, ddof=1).sum(), true @ true
    cosines = [(a + b) @ true / 2 / np.sqrt((a @ b + noise / n) * length) for n in (1, 16)]
    return bias, (errors**2).mean(), (a - true) @ (b - true) / length, *cosines, 1 / cost


def compare(trees: Sequence[Tree], num_groups: int, group_size: int, seed: int) -> dict[str, list[tuple[float, ...]]]:
    """Returns what `measure` finds on each problem, by estimator, all on the same games."""
    rng, found = np.random.default_rng(seed), {}
    played = [tree.play(np.zeros((num_groups, group_size), int), rng) for tree in trees]
    cells = [np.where(edges < 0, -1, tree.cells[edges // A]) for tree, (edges, _) in zip(trees, played, strict=True)]
    critic = by_critic(np.array(cells), np.array([returns for _, returns in played]))
    for tree, (edges, returns), values in zip(trees, played, critic, strict=True):
        estimates = {name: (credit, 1.0) for name, credit in by_group(edges, returns).items()}
        estimates["critic"] = returns[..., None] - values, 1.0
        estimates["critic, step"] = steps(values, edges, returns), 1.0
        for k in (1, 2, 4, 8):
            branches = [tree.play(edges // A, rng) for _ in range(k)]
            values = np.mean([of_branch for _, of_branch in branches], axis=0)
            cost = 1 + sum((more >= 0).sum() for more, _ in branches) / (edges >= 0).sum()
            estimates[f"{k} branches"] = steps(values, edges, returns), cost
        for name, (credit, cost) in estimates.items():
            found.setdefault(name, []).append(measure(tree, edges, credit, cost))
    return found


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--dir", type=Path, default="runs/credit", help="folder of the runs")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="seed of each run and of its problems")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 10, 20], help="0, 10 or 20; 0: before training")
    parser.add_argument("--problems", type=int, default=8, help="problems of each seed")
    parser.add_argument("--groups", type=int, default=500, help="groups of each problem")
    parser.add_argument("--group_size", type=int, default=16, help="games of a group")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    for step in options.steps:
        found, trees = {}, []
        for seed in options.seed:
            folder = options.dir.resolve() / f"seed{seed}"
            if step:
                train(folder, TRAINED | {"seed": seed})
            model, params, tokenizer = load_model(folder / f"step{step}" if step else "models/player")
            forward = jax.jit(partial(logits, model, params))
            own = [grow(ENV.problem(1000 * seed + i), tokenizer, forward) for i in range(options.problems)]
            trees += own
            for name, of_problems in compare(own, options.groups, options.group_size, seed).items():
                found.setdefault(name, []).extend(of_problems)
        reference, rows = np.transpose(found["leave-one-out"]), []
        for name, x in found.items():
            columns = np.transpose(x)
            bias, error, *_, games = columns.mean(axis=1)
            squares = bias, error - bias, np.median(columns[2])  # a mean would be that of a problem without a gradient
            row = [name, *(f"{max(0, square) ** 0.5:.3f}" for square in squares)]
            for i in (1, 3, 4):
                pair = paired_difference(reference[i], columns[i])
                more = "" if name in ("group mean", "leave-one-out") else f" [{pair['low']:+.3f}, {pair['high']:+.3f}]"
                row.append(f"{columns[i].mean():.3f}{more}")
            rows.append([*row, f"{games:.2f}"])
        value = np.mean([tree.exact()[1][0] for tree in trees])
        square = np.mean([tree.mean((tree.probs * tree.exact()[0] ** 2).sum(axis=1)) for tree in trees])
        kept = np.mean([tree.mean(tree.kept) for tree in trees])
        title = f"Step {step}: value {value:.3f}, squared advantage {square:.3f}; {kept:.1%} of replies kept"
        report(title, TITLES, rows, environment())


if __name__ == "__main__":
    main()
