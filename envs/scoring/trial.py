"""Tries rewards, and references as graders read them, on replies to the first problems, before anything is sampled."""

from envs.base import Env, Reply
from envs.scoring.scorer import Job, Scorer, blamed
from envs.scoring.worker import Failure, Turns
from utils.settings.errors import UserError, shorten

NUM_TRIED = 3  # problems
NUM_REFERENCES = 256  # problems whose references are tried
MAX_REFUSED = 0.1  # of these, above which the run stops
NUM_SHOWN = 3  # refused references
DRAWN_ELSEWHERE = (
    "episodes that begin again open with other messages, so each sample of a group plays another one, and none can be "
    "played again, by --resume or if its process is lost: draw by Python's `random`, or from the row"
)


def try_rewards(scorer: Scorer, env: Env) -> list[str]:
    """Returns warnings on episodes that do not repeat, and on refused references. Raises: UserError."""
    jobs: list[Job] = []  # replies to the first problems, right and empty ones
    for index in range(min(NUM_TRIED, env.num_tasks)):
        problem = env.problem(index)
        replies = sorted({problem.prefix, *env.examples(problem).values()})
        if env.max_turns == 1 or env.takes_groups:  # a group has two or more, so that a list of a wrong length is found
            jobs += [(index, reply) for reply in replies * (1 + (env.takes_groups and len(replies) == 1))]
        else:
            jobs += [(index, Turns(0, (), True)), *((index, Turns(0, (Reply(reply),), True)) for reply in replies)]
    check_reward(scorer, jobs)
    return [DRAWN_ELSEWHERE] * (env.opens and not repeats(scorer, env)) + try_references(scorer, env)


def check_reward(scorer: Scorer, jobs: list[Job]) -> None:
    """Raises UserError if all of these jobs fail, unless `max_error_share` allows it; notes the names of rewards."""
    outcomes = scorer.request_outcomes(jobs)
    scorer.parts = {name for x in outcomes for name in (x if isinstance(x, dict) else getattr(x, "info", ()))}
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if len(failures) == len(outcomes) and scorer.settings.max_error_share < 1:
        raise UserError(
            f"{scorer.settings.env_name}: the {blamed(jobs)} fails for each of {len(outcomes)} replies that were "
            f"tried, {failures[0].reason}: correct it"
        )


def repeats(scorer: Scorer, env: Env) -> bool:
    """True if the first episodes return the same messages when they are played again."""
    turns = Turns(0, ()), Turns(0, (Reply(""),)), Turns(0, (Reply(""),), is_truncated=True)
    jobs = [(index, turn) for index in range(min(NUM_TRIED, env.num_tasks)) for turn in turns]
    first, again = scorer.request_outcomes(jobs), scorer.request_outcomes(jobs)
    pairs = [pair for pair in zip(first, again, strict=True) if not any(isinstance(x, Failure) for x in pair)]
    return all(a.messages == b.messages for a, b in pairs)


def try_references(scorer: Scorer, env: Env) -> list[str]:
    """Returns a warning of problems whose reference is wrong when a reply gives it. Raises: UserError for too many."""
    num_tried = min(NUM_REFERENCES, env.num_tasks) if env.max_turns == 1 else 0
    jobs = [(i, reply) for i in range(num_tried) for reply in env.trials(env.problem(i))]
    refused: dict[int, str] = {}  # the first such reply to a problem
    for (i, reply), outcome in zip(jobs, scorer.request_outcomes(jobs) if jobs else [], strict=True):
        if isinstance(outcome, Failure):
            refused.setdefault(i, f"{shorten(reply, 80)}, {outcome.reason}")
        elif not outcome["correct_answer"]:
            refused.setdefault(i, shorten(reply, 80))
    if not refused:
        return []
    shown = [f"{env.problem(i).place or f'problem {i}'}: {reply}" for i, reply in [*refused.items()][:NUM_SHOWN]]
    shown += ["..."] * (len(refused) > NUM_SHOWN)
    message = (
        f"the grader cannot read the reference of {len(refused)} of {num_tried} problems in a reply of the form "
        f"{env.form} ({'; '.join(shown)}): give another form by --env_options, or compare by a function, "
        "--reward FILE.py:FUNCTION"
    )
    if len(refused) > MAX_REFUSED * num_tried:
        raise UserError(f"{scorer.settings.env_name}: {message}")
    return [message]
