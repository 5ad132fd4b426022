"""Replies of an environment graded in a second way: an environment of --test_env_name whose form alone differs."""

from collections.abc import Mapping, Sequence

from envs.base import Changed, Env, Problem


class Regraded(Changed):
    """An environment of one turn whose replies `others` grade too; their rewards are "LABEL/return" and so on."""

    def __init__(self, env: Env, others: Mapping[str, Env]):
        super().__init__(env)
        self.others = others

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[dict[str, float]]:
        rewards = self.env.score_group(problem, texts)
        for label, other in self.others.items():
            again = other.score_group(problem, texts)
            named = [{f"{label}/{name}": x for name, x in reward.items()} for reward in again]
            rewards = [own | more for own, more in zip(rewards, named, strict=True)]
        return rewards
