"""Scores replies in worker processes, where a reward may hang, crash or raise without harming the run.

    with Scorer("countdown", timeout=10) as scorer:
        rewards, counts = scorer.score([0, 0, 1], ["<answer>1+2</answer>", "hm", "..."])

The workers belong to one helper process, a program of its own (utils/rewards/helper.py): a process that runs JAX must
not fork, and multiprocessing's other ways import the main script in every worker, and jax with it: 165 MB each, and
3.2 s until two of them are ready. The helper never imports jax, so its workers can fork from it. Its pipe is the
lifeline: when the run ends, however it ends, the pipe closes, and the helper ends its workers and itself.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from utils.rewards.helper import STALL, Failure, Job, Outcome, Rewards, Settings, limit_waits, max_failures
from utils.rewards.processes import kill_tree

ROOT = Path(__file__).resolve().parents[2]
HELPER = "import sys; sys.path[0] = sys.argv[1]; from utils.rewards.helper import serve; serve(int(sys.argv[2]))"
MAX_WRITTEN = 100  # failures that are kept to be looked at

# Environment variables that workers see; a key that a reward needs is given to it as REWARD_...
PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TMP|TEMP|VIRTUAL_ENV|LD_LIBRARY_PATH|DYLD_\w+"
    r"|PYTHON\w+|CONDA_\w+|XDG_\w+|HF_\w+|CUDA_\w+|NVIDIA_\w+|OMP_\w+|MKL_\w+|OPENBLAS_\w+|NUMEXPR_\w+"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_proxy|\w+_PROXY|REWARD_\w+"
)
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")  # for private data sets


class Scorer:
    """Scores replies to the problems of one environment; use it as a context manager, from one thread at a time.

    `env_name` is a name that `make_env` knows, or "module:function" of something else that makes an Env.
    `num_workers` 0 is one for each core, at most 16. `timeout` is the limit for one reply, in seconds.
    `failures_dir` receives reward_failures.jsonl: the first replies that could not be scored, and why.

    Raises: ValueError when the environment cannot be made.
    """

    def __init__(
        self,
        env_name: str,
        env_options: Mapping[str, str | int | float | bool] | None = None,
        *,
        num_workers: int = 0,
        timeout: float = 10.0,
        failures_dir: str | Path | None = None,
        max_error_share: float = 0.5,
    ):
        num_workers = num_workers or min(os.cpu_count() or 1, 16)
        tokens = {name: os.environ[name] for name in TOKENS if name in os.environ}
        self.settings = Settings(env_name, dict(env_options or {}), num_workers, timeout, max_error_share, tokens)
        self.failures_file = Path(failures_dir) / "reward_failures.jsonl" if failures_dir else None
        self.num_failures, self.is_closed = 0, False
        self.start()

    def score(self, indices: Sequence[int], texts: Sequence[str]) -> tuple[list[Rewards | None], dict[str, int]]:
        """Returns the rewards of each reply, and counts of failures: "reward_timeouts" and "reward_errors".

        A reply that exceeded its time limit, killed its worker or made the reward raise has None in place of rewards.

        Raises: RuntimeError when more than `max_error_share` of the replies (and more than 8) got none: then the reward
        is wrong, not the replies.
        """
        jobs = [(int(index), text) for index, text in zip(indices, texts, strict=True)]
        return self.judge(jobs, self.ask(jobs))

    def judge(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> tuple[list[Rewards | None], dict[str, int]]:
        """Returns (and raises) what `score` does, from the outcome of each job."""
        failures = [(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True) if isinstance(outcome, Failure)]
        counts = {kind: sum(f.kind == kind for _, f in failures) for kind in ("reward_timeouts", "reward_errors")}
        self.report(failures)
        if len(failures) > max_failures(len(jobs), self.settings.max_error_share):
            reason = failures[0][1].reason
            raise RuntimeError(f"The reward failed for {len(failures)} of {len(jobs)} replies: {reason!r}")
        return [None if isinstance(outcome, Failure) else outcome for outcome in outcomes], counts

    def report(self, failures: Sequence[tuple[Job, Failure]]) -> None:
        """Warn about the first failure of the run, and keep the first ones in a file."""
        if failures and not self.num_failures:
            where = f"; see {self.failures_file}" if self.failures_file else ""
            print(f"warning: a reply got no score: {failures[0][1].reason!r}{where}.", file=sys.stderr)
        keep = failures[: max(0, MAX_WRITTEN - self.num_failures)]
        self.num_failures += len(failures)
        if keep and self.failures_file:
            self.failures_file.parent.mkdir(parents=True, exist_ok=True)
            with self.failures_file.open("a") as file:
                for (index, text), failure in keep:
                    record = {"env": self.settings.env_name, "problem": index, "reason": failure.reason, "text": text}
                    file.write(json.dumps(record) + "\n")

    def ask(self, jobs: list[Job]) -> list[Outcome]:
        """Has the helper score replies; a helper that is lost or stuck is replaced once. Empty when the scorer closes.

        Raises: RuntimeError when scoring failed twice.
        """
        reason = ""
        for _ in range(2):
            try:
                self.connection.send(jobs)
                reply = self.receive()
            except TimeoutError as error:
                reply = str(error)
            except (EOFError, OSError):
                reply = "the helper process was lost; is there enough memory?"
            if isinstance(reply, list):
                return reply
            if self.is_closed:
                return []
            reason = reply
            print(f"warning: the process that scores is started again: {reason}", file=sys.stderr)
            self.kill()
            self.start()
        raise RuntimeError(f"Scoring failed twice in a row: {reason}")

    def receive(self) -> list[Outcome] | str:
        """Returns the helper's reply: outcomes, or an error.

        Raises: EOFError or OSError when the helper is lost or the scorer closes; TimeoutError when it gives no sign of
        life for STALL seconds.
        """
        last_alive = time.monotonic()
        while time.monotonic() - last_alive < STALL:
            if self.is_closed:
                raise EOFError
            if self.connection.poll(0.1):
                reply = self.connection.recv()
                if reply is not None:
                    return reply
                last_alive = time.monotonic()
        raise TimeoutError(f"the helper process gave no sign of life for {STALL} seconds")

    def start(self) -> None:
        """Starts the helper and waits until its workers have made the environment."""
        self.connection, theirs = Pipe()
        limit_waits(self.connection)
        command = [sys.executable, "-c", HELPER, str(ROOT), str(theirs.fileno())]
        # Its own session, since Ctrl-C is for the run, which then closes the pipe.
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=worker_variables(os.environ),
        )
        theirs.close()
        try:
            self.connection.send(self.settings)
            self.connection.send([])
            reply = self.receive()
        except (EOFError, OSError) as error:
            self.kill()
            raise RuntimeError("The helper process for scoring did not start; it says above why.") from error
        if isinstance(reply, str):
            self.close()
            raise ValueError(f"{self.settings.env_name}: {reply}")

    def close(self) -> None:
        """Stop the workers; takes a second at most, and cannot hang."""
        self.is_closed = True
        self.connection.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the helper and everything it started, at once."""
        self.connection.close()
        if self.process.returncode is None:  # else the number may be another's by now
            kill_tree(self.process.pid)
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def worker_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that workers see: those they need to run, and no keys, tokens or passwords."""
    return {name: value for name, value in variables.items() if PASSED.fullmatch(name) and name not in TOKENS}


class Stream:
    """Scores replies of one rollout in the background, while others are sampled: a context manager.

    A request takes all that have come since the one before it: however long a reply keeps it, the end waits for two.
    """

    def __init__(self, scorer: Scorer):
        self.scorer, self.queue = scorer, SimpleQueue()
        self.outcomes: dict[int, tuple[Job, Outcome]] = {}
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def add(self, jobs: dict[int, Job]) -> None:
        """Replies to score, by the number of their row."""
        self.queue.put(jobs)

    def run(self) -> None:
        try:
            is_open = True
            while is_open:
                parts = [self.queue.get()]
                while not self.queue.empty():
                    parts.append(self.queue.get())
                is_open = None not in parts
                jobs = {row: job for part in parts if part for row, job in part.items()}
                if jobs:
                    outcomes = self.scorer.ask([*jobs.values()])
                    self.outcomes |= zip(jobs, zip(jobs.values(), outcomes, strict=False), strict=False)
        except BaseException as error:  # noqa: BLE001 (raised again by `finish`)
            self.error = error

    def finish(self) -> dict[int, tuple[Job, Outcome]]:
        """The job and the outcome of each row, once all are there; raises what went wrong."""
        self.queue.put(None)
        self.thread.join()
        if self.error:
            raise self.error
        return self.outcomes

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.queue.put(None)
