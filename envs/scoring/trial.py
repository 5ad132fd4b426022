"""Tries rewards, and references as graders read them, on replies to the first problems, before anything is sampled."""

from envs.base import Env, Reply, Trial
from envs.scoring.scorer import Scorer
from envs.scoring.worker import Failure, Group, Job, Outcome, Turns
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
    """Returns warnings: if episodes do not repeat, and of references that no reply can meet.

    Raises: UserError for a reward that fails, and if more than MAX_REFUSED of the references are refused.
    """
    scorer.check_reward(example_jobs(env))
    drawn_elsewhere = env.opens and not scorer.repeats(repeated_jobs(env))
    return [DRAWN_ELSEWHERE] * drawn_elsewhere + try_references(scorer, env)


def try_references(scorer: Scorer, env: Env) -> list[str]:
    """Returns a warning of the problems of which no reference is right when a reply gives it in the required format.

    Such a reply goes the whole way of others: its answer is found, read and compared. Raises: UserError for too many.
    """
    num_tried = min(NUM_REFERENCES, env.num_tasks) if env.max_turns == 1 else 0
    jobs = [(i, trial) for i in range(num_tried) for trial in env.trials(env.problem(i))]
    outcomes = scorer.request_outcomes(jobs) if jobs else []
    reasons: dict[tuple[int, str], list[str]] = {}  # of the references of a problem, by the way to give them
    for (i, trial), outcome in zip(jobs, outcomes, strict=False):  # there are none if the scorer closes
        reasons.setdefault((i, trial.shown), []).append(reason_of(trial, outcome))
    refused = {i: given[0] for (i, _), given in reasons.items() if all(given)}
    if not refused:
        return []
    shown = [f"{env.problem(i).place or f'problem {i}'}: {reason}" for i, reason in [*refused.items()][:NUM_SHOWN]]
    shown += ["..."] * (len(refused) > NUM_SHOWN)
    message = (
        f"the grader cannot read the reference of {len(refused)} of {num_tried} problems in a reply of the form "
        f"{env.form} ({'; '.join(shown)}): give another form by --env_options, or compare by a function, "
        "--reward FILE.py:FUNCTION"
    )
    if len(refused) > MAX_REFUSED * num_tried:
        raise UserError(f"{scorer.settings.env_name}: {message}")
    return [message]


def reason_of(trial: Trial, outcome: Outcome) -> str:
    """Returns why a reply that gives a reference is wrong; empty if it is right."""
    if isinstance(outcome, Failure):
        return f"{shorten(trial.reference, 60)}, {outcome.reason}"
    if outcome["correct_answer"] > 0:
        return ""
    if not outcome.get("format", 1.0):
        return f"{shorten(trial.reference, 60)}, no answer is found in {shorten(str(trial), 80)}"
    return f"{shorten(trial.reference, 60)}, which the grader cannot read in {shorten(str(trial), 80)}"


def example_jobs(env: Env) -> list[Job]:
    """Returns replies to the first problems, right and empty ones; episodes end with them.

    If rewards compare replies, each problem has a group of two or more, so that lists of a wrong length are found.
    """
    jobs = []
    for index in range(min(NUM_TRIED, env.num_tasks)):
        problem = env.problem(index)
        replies = sorted({problem.prefix, *env.examples(problem).values()})
        if env.takes_groups:
            jobs.append((index, Group(tuple(replies if len(replies) > 1 else replies * 2))))
        elif env.max_turns == 1:
            jobs += [(index, reply) for reply in replies]
        else:
            jobs += [(index, Turns(0, (), True)), *((index, Turns(0, (Reply(reply),), True)) for reply in replies)]
    return jobs


def repeated_jobs(env: Env) -> list[Job]:
    """Returns the beginnings of the first episodes, and their ends."""
    turns = Turns(0, ()), Turns(0, (Reply(""),)), Turns(0, (Reply(""),), is_truncated=True)
    return [(index, turn) for index in range(min(NUM_TRIED, env.num_tasks)) for turn in turns]
