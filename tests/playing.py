"""Small environments and workers that sample from the small model and grade in this process."""

import threading
import zlib

from core.config import Config
from core.grpo import collect, make_batch
from core.records import Batch, Episodes, Progress
from core.rollout import RolloutWorker
from core.sampler import Sampler
from envs.base import Env, Problem
from envs.scoring.scorer import Scorer
from envs.scoring.worker import ScorerSettings
from models.distribution import Distribution
from models.pages import Paging
from tests.helpers import MODEL, Letters, random_params
from tests.learning import CONFIG
from utils.devices.sharding import single_device
from utils.settings.config import with_options


class Digest(Env):
    """Rewards as if drawn at random from 0, 1/4, ..., 1, by task and text; every third task always pays 0.1."""

    def __init__(self, num_tasks: int):
        self.num_tasks = num_tasks

    def problem(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": "abcdefghijk"[: 1 + index % 11]}], index)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        share = 0.1 if problem.answer % 3 == 0 else zlib.crc32(f"{problem.answer} {text}".encode()) % 5 / 4
        return {"return": share, "correct_answer": float(share > 0.5)}


class HereScorer(Scorer):
    """Scores without worker processes."""

    def __init__(self, env: Env):
        self.env, self.num_failures, self.failures_file = env, 0, None
        self.settings = ScorerSettings("", {}, 0.0, max_error_share=0.5)
        self.error, self.has_outcomes = None, threading.Condition(threading.RLock())

    def put(self, calls):
        for stream, rows, index, replies in calls:
            stream.publish(rows, self.request_outcomes([(index, reply) for reply in replies]))

    def withdraw(self, stream):
        return []

    def request_outcomes(self, jobs):
        return [self.env.score(self.env.problem(i), text) for i, text in jobs]


WHOLE = Distribution()
COLLECT = with_options(CONFIG, groups_per_batch=4)


def make_worker(num_tasks: int, num_slots: int = 64, distribution: Distribution = WHOLE) -> RolloutWorker:
    env = Digest(num_tasks)
    sampler = Sampler(MODEL, 6, (3,), distribution, paging=Paging(num_slots=num_slots))
    return RolloutWorker(
        env=env,
        name="digest",
        tokenizer=Letters(),
        sampler=sampler,
        scorer=HereScorer(env),
        layout=single_device(),
    )


def collect_batch(worker: RolloutWorker, config: Config, cursor: int = 0) -> tuple[Batch, Episodes, int]:
    """The batch of a step, all of its episodes, and the number of the next task."""
    weights = worker.load_weights(random_params())
    episodes, cursor = collect(worker, weights, config, Progress(cursor=cursor))
    return make_batch(episodes, config), episodes, cursor
