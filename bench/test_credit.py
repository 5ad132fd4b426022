"""The estimators of bench/credit.py against loops over games of a small tree, and its trees against sampled games."""

from math import log

import numpy as np
import pytest

from bench.credit import ENV, TRAINED, A, Tree, by_critic, by_group, grow, measure, steps
from core.rollout import make_worker
from core.sampler import SamplingConfig
from core.terms.turn_rewards import turn_numbers
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, resolve_settings
from models.checkpoint import load_model
from models.decoder import logits
from utils.devices.sharding import single_device
from utils.threefry import make_key

# Prefix 0: number 0 ends the game, 1 and 2 lead to the prefixes 1 and 2, where 0 and 1 end it.
PROBS, REWARDS = [[0.2, 0.3, 0.5], [0.6, 0.4, 0], [0.9, 0.1, 0]], [[1, 0, 0], [0.8, 0, 0], [0, 0.4, 0]]
Q, V = [[1, 0.48, 0.04], [0.8, 0], [0, 0.4]], [0.2 + 0.3 * 0.48 + 0.5 * 0.04, 0.48, 0.04]


@pytest.fixture(scope="module")
def tree():
    padding = (0, 0), (0, A - 3)
    children = np.pad([[-1, 1, 2], [-1] * 3, [-1] * 3], padding, constant_values=-1)
    arrays = np.pad(PROBS, padding), np.pad(np.array(REWARDS, float), padding), children
    return Tree(
        *arrays, reached=np.array([1, 0.3, 0.5]), intervals=np.array([1009, A**2 + 405, A**2 + 405]), kept=np.ones(3)
    )


@pytest.fixture(scope="module")
def games(tree):
    edges, returns = tree.play(np.zeros((400, 5), int), np.random.default_rng(0))
    return edges[..., :2], returns


def loop_over_group(edges, returns):
    """Returns the advantages of `by_group` for a group, turn by turn, from lists of games."""
    paths = [[edge for edge in game if edge >= 0] for game in edges.tolist()]
    found = {}
    for i, (path, own) in enumerate(zip(paths, returns, strict=True)):
        rest = [value for j, value in enumerate(returns) if j != i]
        for turn in range(len(path)):
            passing = [j for j, other in enumerate(paths) if len(other) > turn and other[:turn] == path[:turn]]
            value = np.mean(returns[passing])
            same = [j for j in passing if paths[j][turn] == path[turn]]
            step = np.mean(returns[same]) - value
            others, back = [], turn
            while not others:
                others = [j for j, x in enumerate(paths) if j != i and len(x) > back and x[:back] == path[:back]]
                back -= 1
            found[i, turn] = {
                "group mean": own - np.mean(returns),
                "leave-one-out": own - np.mean(rest),
                "prefix tree": own - value,
                "prefix tree, step": step,
                "TEMPO, not divided": own - np.mean(returns) + step,
                "leave-one-out tree": own - np.mean(returns[others]),
            }
    return found


def test_exact_values_are_those_of_the_tree(tree):
    advantages, values = tree.exact()
    np.testing.assert_allclose(values, V)
    for prefix, of_prefix in enumerate(Q):
        np.testing.assert_allclose(advantages[prefix, : len(of_prefix)], np.array(of_prefix) - V[prefix])


def test_games_are_sampled_by_the_probabilities_of_the_tree(tree, games):
    edges, returns = games
    counts = np.bincount(edges[edges >= 0], minlength=3 * A).reshape(3, A) / returns.size
    np.testing.assert_allclose(counts, tree.reached[:, None] * tree.probs, atol=0.03)
    np.testing.assert_allclose(returns.mean(), V[0], atol=0.02)
    last = np.where(edges[..., 1] < 0, edges[..., 0], edges[..., 1])
    np.testing.assert_array_equal(returns, tree.rewards.ravel()[last])


def test_estimators_of_a_group_equal_a_loop_over_games(games):
    edges, returns = games
    found = {name: np.broadcast_to(credit, edges.shape) for name, credit in by_group(edges, returns).items()}
    for group in range(50):
        for (game, turn), expected in loop_over_group(edges[group], returns[group]).items():
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name][group, game, turn], value, atol=1e-6, err_msg=name)


def test_the_critic_is_the_mean_over_games_of_other_problems(tree, games):
    edges, returns = games
    played, earned = edges[:60].reshape(3, 4, 5, 5, 2)[:, :, 0], returns[:60].reshape(3, 4, 5, 5)[:, :, 0]
    cells = np.where(played < 0, -1, tree.cells[played // A])
    values = by_critic(cells, earned)
    for problem, batch, game, turn in zip(*np.nonzero(played >= 0), strict=True):
        cell, back, others = cells[problem, batch, game, turn], turn, []
        while not others:
            cell = cells[problem, batch, game, back]
            others = [
                earned[p, batch, g]
                for p in range(3) for g in range(5)
                if p != problem and cell in cells[p, batch, g]
            ]  # fmt: skip
            back -= 1
        np.testing.assert_allclose(values[problem, batch, game, turn], np.mean(others))


def test_steps_of_exact_values_are_q_minus_v(tree, games):
    edges, returns = games
    exact, values = tree.exact()
    found = steps(np.append(values, 0)[np.where(edges < 0, -1, edges // A)], edges, returns)
    np.testing.assert_allclose(found[edges >= 0], exact.ravel()[edges[edges >= 0]], atol=1e-12)


def test_bias_error_and_gradient_equal_loops_over_games(tree, games):
    edges, returns = games
    exact = tree.exact()[0]
    credit = np.broadcast_to(by_group(edges, returns)["group mean"], edges.shape)
    true = tree.reached[:, None] * tree.probs * exact
    gradients, errors = np.zeros((len(edges), 3, A)), {}
    for group, game, turn in zip(*np.nonzero(edges >= 0), strict=True):
        prefix, number = divmod(edges[group, game, turn], A)
        gradients[group, prefix, number] += credit[group, game, turn] / edges.shape[1]
        gradients[group, prefix] -= tree.probs[prefix] * credit[group, game, turn] / edges.shape[1]
        error = credit[group, game, turn] - exact[prefix, number]
        errors.setdefault((prefix, number), ([], []))[group % 2].append(error)
    weights = [tree.reached[prefix] * tree.probs[prefix, number] for prefix, number in errors]
    squares = [np.mean(even) * np.mean(odd) for even, odd in errors.values()]
    gradients[:, 1], gradients[:, 2], true[1], true[2] = gradients[:, 1] + gradients[:, 2], 0, true[1] + true[2], 0
    even, odd = gradients[::2].mean(axis=0), gradients[1::2].mean(axis=0)
    noise = 3 * gradients.var(axis=0, ddof=1).sum()
    squares_of_gradient = [(even * odd).sum() + noise, (even * odd).sum() + noise / 16]
    expected = (
        np.average(squares, weights=weights),
        np.mean([x**2 for halves in errors.values() for half in halves for x in half]),
        ((even - true) * (odd - true)).sum() / (true**2).sum(),
        *(((even + odd) / 2 * true).sum() / (square * (true**2).sum()) ** 0.5 for square in squares_of_gradient),
        1 / 3,
    )
    np.testing.assert_allclose(measure(tree, edges, credit, cost=3), expected, rtol=1e-6)


def test_the_bias_of_the_group_mean_is_the_one_of_its_formula(tree):
    edges, returns = tree.play(np.zeros((20_000, 4), int), np.random.default_rng(1))
    edges = edges[..., :2]
    expected = 0
    for prefix, of_prefix in enumerate(Q):
        for number, q in enumerate(of_prefix):  # the own return is a quarter of the mean
            bias = V[prefix] - (q + 3 * V[0]) / 4
            expected += tree.reached[prefix] * PROBS[prefix][number] * bias**2 / tree.reached.sum()
    credits = by_group(edges, returns)
    found = measure(tree, edges, credits["group mean"], cost=1)
    np.testing.assert_allclose(found[0], expected, rtol=0.03)
    np.testing.assert_allclose(found[2], 1 / 16, rtol=0.1)  # a quarter of the gradient is missing
    for name in ("leave-one-out", "leave-one-out tree"):
        assert abs(measure(tree, edges, credits[name], cost=1)[2]) < 5e-4, name


@pytest.mark.slow
def test_trees_have_the_probabilities_of_sampled_games():
    layout = single_device()
    model, params, tokenizer = load_model("models/player", layout)
    tree = grow(ENV.problem(3), tokenizer, lambda rows: logits(model, params, rows))
    settings = resolve_settings(EnvConfig("guess", TRAINED["env_options"]), "guess", 96, 0)
    sampling = SamplingConfig(prompt_length=32, num_generation_tokens=96)
    with make_worker(settings, sampling, RewardConfig(), model, tokenizer, layout) as worker:
        episodes = worker.play(worker.load_weights(params), np.array([3]), 32, make_key(0))
    completions, num_found = episodes.completions, 0
    turns = turn_numbers(completions.mask)
    for row, conversation in enumerate(episodes.conversations):
        prefix, game = 0, ENV.episode(ENV.problem(3), 0)
        for turn, reply in enumerate(said["content"] for said in conversation if said["role"] == "assistant"):
            opening, _, number = reply.rpartition(":")
            is_known = opening == f"{game.low}-{game.high}" and number in map(str, range(A))
            if not is_known or not tree.probs[prefix, number := int(number)]:
                break  # a reply that is not in the tree
            columns = np.flatnonzero(completions.mask[row] & (turns[row] == turn))[:-1]  # without the end of the turn
            expected = log(tree.kept[prefix] * tree.probs[prefix, number])
            np.testing.assert_allclose(completions.logprobs[row, columns].sum(), expected, atol=1e-3)
            num_found += 1
            if game.step(reply).done:
                np.testing.assert_allclose(episodes.scores["return"][row], tree.rewards[prefix, number], atol=1e-6)
            prefix = tree.children[prefix, number]
    assert num_found > 60
