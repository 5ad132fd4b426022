"""Tries the rewards of an environment on replies to its first problems, before anything is drawn."""

from envs.base import Env, Reply
from envs.scoring.helper import Job, Turns
from envs.scoring.scorer import Scorer

NUM_TRIED = 3  # problems
DRAWN_ELSEWHERE = (
    "episodes that are begun again say something else: each sample of a group plays another one, and none can be "
    "played again, by --resume or where its process is lost; draw by Python's `random`, or from the row"
)


def try_rewards(scorer: Scorer, env: Env) -> str:
    """Returns a warning where episodes do not repeat, else no text. Raises: UserError for a reward that fails."""
    scorer.check_reward(example_jobs(env))
    return DRAWN_ELSEWHERE if env.opens and not scorer.repeats(repeated_jobs(env)) else ""


def example_jobs(env: Env) -> list[Job]:
    """Returns replies to the first problems, right and empty ones; episodes end with them."""
    jobs = []
    for index in range(min(NUM_TRIED, env.num_tasks)):
        problem = env.problem(index)
        replies = sorted({problem.prefix, *env.examples(problem).values()})
        turns = [Turns(0, (Reply(reply),), is_truncated=True) for reply in replies]
        jobs += [(index, reply) for reply in (replies if env.max_turns == 1 else [Turns(0, (), True), *turns])]
    return jobs


def repeated_jobs(env: Env) -> list[Job]:
    """Returns the beginnings of the first episodes, and their ends."""
    turns = Turns(0, ()), Turns(0, (Reply(""),)), Turns(0, (Reply(""),), is_truncated=True)
    return [(index, turn) for index in range(min(NUM_TRIED, env.num_tasks)) for turn in turns]
