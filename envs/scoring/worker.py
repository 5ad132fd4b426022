"""What a grading process does: it makes the environment, then scores replies and plays turns of episodes.

It runs in a lane of envs/scoring/scorer.py and never imports JAX. Rewards, environments and tools are other people's
code: what they raise is an outcome of the reply, and what they return is checked here.
"""

import contextlib
import functools
import importlib
import io
import json
import math
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from envs import make_env
from envs.base import NOT_APPLICABLE, Env, Episode, Problem, Reply, Step, limited
from utils.processes import ROOT
from utils.settings.errors import UserError, on_one_line

MAX_EPISODES = 2048  # episodes that a process keeps: abandoned ones would fill its memory
MAX_REWARD = 1e35  # largest reward of a reply or turn: sums of many fit into float32 (3e38)
MAX_PRINTED = 1000  # characters of a line; a pipe takes 4,096 bytes in one piece
STEP_FORM = "Step(messages, reward, done), of messages with role and content"
TAKEN = ("length", "finished", "return_spread", "groups_without_signal")  # under env/ the log has others of its own


class Turns(NamedTuple):
    """Replies of the policy in an episode so far. Their outcome is the response to the last one, or the opening."""

    seed: int
    replies: tuple[Reply, ...]
    is_truncated: bool = False  # by a limit: the response to the last reply is known already
    game: int = 0  # seeds what is generated before the first turn
    said: int = 0  # digest of the environment's messages so far; 0: not to be compared


Rewards = dict[str, float]  # by name; "return" is what training maximizes


class Failure(NamedTuple):
    """The reason why a reply has no rewards."""

    kind: str  # "reward_timeouts" or "reward_errors"
    reason: str  # may quote the reply: only its repr may reach a terminal
    remedy: str = ""  # what to do; empty: that of its kind


Outcome = Rewards | Step | Failure
GraderRequest = tuple[int, tuple[str | Turns, ...]]  # number of the problem, and replies to it that are graded together


def outcome_to_json(outcome: Outcome) -> list[object]:
    """Returns the kind of an outcome and its fields."""
    return [type(outcome).__name__, *([outcome] if isinstance(outcome, dict) else outcome)]


def outcome_from_json(values: list[object]) -> Outcome:
    kind, *fields = values
    return {"dict": dict, "Step": Step, "Failure": Failure}[kind](*fields)


def heard(said: int, step: Step) -> int:
    """Returns the digest of an environment's observations, this step included."""
    return zlib.crc32(json.dumps(step.messages).encode(), said) if step.messages else said


class ScorerSettings(NamedTuple):
    """Settings of the processes."""

    env_name: str
    env_options: Mapping[str, str | int | float | bool]
    timeout: float
    max_error_share: float


def work(settings: ScorerSettings, requests: Iterator[Sequence[GraderRequest]]) -> Iterator[object]:
    """Makes the environment and yields its traits, or the reason why it cannot be made; then grades.

    For requests it yields None when it takes them, and the outcomes of each before it begins the next.
    """
    sys.stdout, sys.stderr = (io.TextIOWrapper(Printed(fd), "utf-8", "replace", write_through=True) for fd in (1, 2))
    try:
        if ":" in settings.env_name:
            module, function = settings.env_name.split(":")
            env = getattr(importlib.import_module(module), function)(**settings.env_options)
        else:
            env = make_env(settings.env_name, **settings.env_options)
    except BaseException as error:  # noqa: BLE001 (environments are other people's code)
        yield str(error) if isinstance(error, UserError) else describe_failure(error)
        return
    yield {"takes_groups": env.takes_groups}
    episodes, worker = EpisodeCache(), os.getpid()
    for jobs in requests:
        yield None
        problem = functools.cache(env.problem)  # the replies of a group share theirs
        for index, replies in jobs:
            try:
                if isinstance(replies[0], Turns):
                    outcomes = [episodes.play(env, problem, index, turns) for turns in replies]
                else:
                    outcomes = score_group(env, problem(index), replies)
            except BaseException as error:  # noqa: BLE001 (rewards are other people's code)
                outcomes = [Failure("reward_errors", describe_failure(error))] * len(replies)
            if os.getpid() != worker:  # a child that the reward has forked, and that came back out of it
                os._exit(0)
            yield [outcome_to_json(outcome) for outcome in outcomes]
    episodes.close()
    env.close()


class Printed(io.RawIOBase):
    """Writes what a reward prints by whole lines, which may quote a reply, over the progress of a terminal."""

    def __init__(self, fd: int):
        self.fd, self.pending = fd, ""
        self.start = "\r\x1b[Kreward: " if os.isatty(fd) else "reward: "

    def write(self, data: memoryview) -> int:
        *lines, self.pending = (self.pending + bytes(data).decode(errors="replace")).split("\n")
        self.pending = self.pending[:MAX_PRINTED]
        with contextlib.suppress(OSError):  # nobody reads any longer
            for line in lines:
                os.write(self.fd, f"{self.start}{on_one_line(line.expandtabs()[:MAX_PRINTED])}\n".encode())
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd


def score_group(env: Env, problem: Problem, texts: Sequence[str]) -> list[Rewards | Failure]:
    """Returns the rewards of replies that are graded together; of those that raise alone, the reason."""
    try:
        return list(map(checked_return, env.score_group(problem, texts)))
    except Exception as error:
        if len(texts) == 1:
            raise
        alone: list[Rewards | Failure] = []
        for text in texts:
            try:
                alone.append(checked_return(env.score(problem, text)))
            except Exception as own:  # noqa: BLE001 (of the reward)
                alone.append(Failure("reward_errors", describe_failure(own)))
        left = [text for text, found in zip(texts, alone, strict=True) if not isinstance(found, Failure)]
        if len(left) in (0, len(texts)):
            raise error from None
        scores = map(checked_return, env.score_group(problem, left))
        return [found if isinstance(found, Failure) else next(scores) for found in alone]


class EpisodeCache:
    """Episodes that a worker has played so far, by problem, seed and replies; other episodes are played again."""

    def __init__(self):
        self.episodes: dict[tuple[int, int, tuple[Reply, ...]], Episode] = {}

    def play(self, env: Env, problem: Callable[[int], Problem], index: int, turns: Turns) -> Step:
        """Returns the response to the last turn; without a turn it begins anew, and returns the opening."""
        replies, is_opening = turns.replies, not (turns.replies or turns.is_truncated)
        before = replies if turns.is_truncated else replies[:-1]
        episode = self.episodes.pop((index, turns.seed, before), None)
        if episode and is_opening:
            episode.close()
        is_new = not episode or is_opening
        if is_new:
            episode = env.episode(replace(problem(index), seed=turns.game), turns.seed)
        try:
            if is_new:
                catch_up(episode, before, turns.said)
            step = opening(episode) if is_opening else answer(episode, None if turns.is_truncated else replies[-1])
        except BaseException:
            episode.close()
            raise
        if step.done:
            episode.close()
            return step
        self.episodes[index, turns.seed, replies] = episode
        if len(self.episodes) > MAX_EPISODES:
            self.episodes.pop(next(iter(self.episodes))).close()
        return step

    def close(self) -> None:
        """Ends all episodes."""
        for episode in self.episodes.values():
            episode.close()


def catch_up(episode: Episode, replies: Sequence[Reply], said: int) -> None:
    """Plays turns again. Raises: ValueError if the environment responds differently than before."""
    digest = heard(0, opening(episode)) if episode.opening else 0
    for reply in replies:
        digest = heard(digest, answer(episode, reply))
    if said not in (0, digest):
        raise ValueError(
            "its process was lost, and when the episode was played again, the environment returned other messages"
        )


def opening(episode: Episode) -> Step:
    """Returns the opening of an episode: its prompt. Raises: TypeError if it is not a list of messages."""
    try:
        return checked_step(Step(list(episode.opening)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        given = f"{type(episode).__name__}.opening is {episode.opening!r:.200}"
        raise TypeError(f"{given}: it must be a list of messages with role and content") from error


def answer(episode: Episode, reply: Reply | None) -> Step:
    """Returns the response to a turn; without a turn, the reward that is left at a limit. Raises: TypeError."""
    step = episode.truncate() if reply is None else episode.act(reply)
    try:
        return checked_step(limited(step))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        is_act = type(episode).act is not Episode.act
        from envs.own_code import wrong_return

        own = episode.truncate if reply is None else episode.act if is_act else episode.step
        returned, reason = (tuple(step), f" ({error})") if isinstance(step, Step) else (step, "")
        raise wrong_return(own, returned, STEP_FORM + reason) from error


def checked_rewards(rewards: Mapping[str, float]) -> Rewards:
    """Returns rewards as plain numbers. Raises: ValueError for a name that the log has for a metric of its own."""
    if taken := next((name for name in TAKEN if name in rewards), ""):
        raise ValueError(f"the log has an env/{taken} of its own: give this part of the reward another name")
    return {str(name): float(value) for name, value in rewards.items()}


def checked_return(rewards: Mapping[str, float]) -> Rewards:
    """Returns rewards as plain numbers. Raises: ValueError as `checked_rewards`, and for a return out of bounds."""
    numbers = checked_rewards(rewards)
    checked_number("return", numbers["return"], may_lack=NOT_APPLICABLE in numbers)
    return numbers


def checked_number(name: str, value: float, may_lack: bool) -> float:
    """Returns a number; NaN for none, if it `may_lack`. Raises: ValueError if float32 could not hold a sum of many."""
    number = float(value)
    if not (abs(number) <= MAX_REWARD or (may_lack and math.isnan(number))):
        raise ValueError(f"the {name} is {number}, not from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return number


def checked_step(step: Step) -> Step:
    """Returns a step of plain types. Raises: ValueError for bad rewards, and for an episode that cannot go on."""
    # With "?" for halves of surrogate pairs, which no tokenizer takes.
    messages = [{key: str(message[key]).encode(errors="replace").decode() for key in ("role", "content")}
                for message in step.messages]  # fmt: skip
    info = checked_rewards(step.info)
    may_lack = NOT_APPLICABLE in info
    for name, value in info.items():
        checked_number(name, value, may_lack)
    if not messages and not step.done:
        raise ValueError("the environment returns no message, and does not end the episode")
    return Step(messages, checked_number("reward of a turn", step.reward, may_lack), bool(step.done), info)


def describe_failure(error: BaseException) -> str:
    """Returns an error in 500 characters, even one that cannot be printed, and its last line in code of the user."""
    packages = [str(ROOT / package) for package in ("core", "envs", "recipes/agents", "utils")]
    own = (*packages, sys.prefix, sys.base_prefix, "<")
    try:
        # Not by extract_tb, which reads the files: a reward may raise for many replies.
        lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        lines = [f" (line {number} of {file})" for file, number in lines if not file.startswith(own)]
        return f"{type(error).__name__}: {error}"[:500] + "".join(lines[-1:])
    except Exception:
        return type(error).__name__
