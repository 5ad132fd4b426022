"""Samples conversations: turns of the policy and observations of an environment in the same rows of the KV cache.

Turns are never encoded or computed again: observations are appended to the sampled tokens, each row at its own length.
A sample depends on the row's own tokens and their number alone. It depends neither on other rows nor on the time that
an environment takes.

B rows, A columns after the prompt.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from core.chains.replies import Replies
from core.records import Completions
from core.sampler import Next, Sampler, Turn
from envs.base import DIALECTS, INLINE, Dialect, Problem, Reply, Step
from envs.scoring.scorer import NO_WAIT, GradedReplies, WaitForMore
from envs.scoring.worker import Failure, Outcome, Turns, heard, outcome_from_json, outcome_to_json
from envs.tools.calls import FORMS, CallError, Form, calls_as_json
from models.messages import REPLY, Message, Tool, is_begun, tool_schema
from models.tokenizer import TURN, UNREAD, Tokenizer
from utils.metrics.jsonl import JSON
from utils.settings.errors import UserError


def answering_calls(sampler: Sampler, dialect: Dialect) -> Sampler:
    """Returns a sampler whose turns end with a call, if the dialect writes results after calls."""
    tokenizer = sampler.tokenizer
    if not dialect.is_inline:
        return sampler
    closing = tokenizer.added_ids.get(dialect.closing)
    if closing is None:
        return replace(sampler, stop_strings=(*sampler.stop_strings, dialect.closing))
    return replace(sampler, stop_ids=(*sampler.stop_ids, closing))


KNOWN_TOOL = {"type": "function", "function": {"name": "weigh", "description": "Weighs.", "parameters": {
    "type": "object", "required": ["what"], "properties": {
        "what": {"type": "string", "description": "A thing."},
        "times": {"type": "integer", "description": "How often."}}}}}  # fmt: skip
KNOWN_CALL = "weigh", {"what": "an egg", "times": 3}


def form_of(tokenizer: Tokenizer, dialect: str) -> Form | None:
    """Returns the form of calls in a dialect: of "qwen", which is the default, the form that the chat template writes.

    None: no reader recovers a call that the template writes.
    """
    return own_form(tokenizer, tokenizer.template) if dialect == "qwen" else FORMS.get(dialect)


@lru_cache(maxsize=64)
def own_form(tokenizer: Tokenizer, template: str) -> Form | None:
    """Returns the form that reads a known call as the chat template writes it.

    A template that shows no tools gets the announcement of models/messages.py, which asks for Qwen's form.
    """
    name, arguments = KNOWN_CALL
    called = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = [{"role": "user", "content": TURN}]
    reply = {"role": REPLY, "content": "", "tool_calls": [called]}
    try:
        opened = tokenizer.render(asked, None, tools=[KNOWN_TOOL]) if template else ""
        if name not in opened:
            return FORMS["qwen"]
        whole = tokenizer.render([*asked, reply], None, is_open=False, tools=[KNOWN_TOOL])
    except UserError:
        return None
    ids = tokenizer.encode(whole[len(opened) :] if whole.startswith(opened) else whole.rpartition(TURN)[2])
    for form in FORMS.values():
        bodies = tokenizer.calls(ids, form.opening, form.closing)
        with contextlib.suppress(CallError):
            if [form.read(body, [KNOWN_TOOL]) for body in bodies] == [KNOWN_CALL]:
                return form
    return None


def read_calls(
    tokenizer: Tokenizer, turn: Int[np.ndarray, "A"], form: Form | None, tools: Sequence[Tool]
) -> tuple[str, ...]:
    """Returns the calls of tools in a turn, as JSON; a call that cannot be read stays as it is."""
    if form is None:
        return ()
    return calls_as_json(form, tokenizer.calls(turn, form.opening, form.closing), [*map(tool_schema, tools)])


def before_calls(tokenizer: Tokenizer, turn: Int[np.ndarray, "A"], form: Form) -> Int[np.ndarray, "_"]:
    """Returns the tokens of a turn before its first call, if the form's marker is a token; if not, all or none."""
    opening = tokenizer.added_ids.get(form.opening)
    if opening is None:
        return turn if form.opening else turn[:0]
    return turn[: int(np.argmax(turn == opening))] if opening in turn else turn


@dataclass
class Record:
    """An episode so far."""

    seed: int
    game: int = 0  # seeds the opening, which the group shares
    said: int = 0  # digest of the environment's messages
    replies: list[Reply] = field(default_factory=list)  # replies of the policy, each with its prefix
    messages: list[list[Message]] = field(default_factory=list)  # messages that followed each reply except the last
    num_left: int = 0  # tokens that fit into the row after the last reply; -1: it was truncated
    last_token: int = -1  # last token of the last reply
    scores: Counter[str] = field(default_factory=Counter)
    turn_rewards: list[float] = field(default_factory=list)
    stop: str = ""  # reason of its end: done, failed, max_turns; max_tokens: truncated, or no room for what follows

    @property
    def turns(self) -> Turns:
        """Request for the environment's response to the last reply."""
        return Turns(
            seed=self.seed,
            replies=tuple(self.replies),
            is_truncated=bool(self.stop),
            game=self.game,
            said=self.said,
        )

    def before(self, prompt: Sequence[Message]) -> list[Message]:
        """Returns the messages up to the last reply, for the chat template: without sampled ones."""
        messages = [*prompt]
        for said in self.messages:
            if said[0]["role"] != INLINE:  # an inline result: the reply continues after it
                messages += [*([] if is_begun(messages) else [UNREAD]), *said]
        return messages

    def conversation(self) -> list[Message]:
        """Returns turns and what followed them."""
        messages = []
        for i, reply in enumerate(self.replies):
            messages.append({"role": "assistant", "content": reply.text})
            messages += self.messages[i] if i < len(self.messages) else []
        return messages


class Conversations(Replies):
    """Episodes of a rollout: encoded observations, and rewards; rows are numbered over the prompts of all calls.

    Each process sends its share of the turns to the environment. Every process receives all observations, since all
    compute the same rows. A row's sampling key seeds its episode; that of a group's first row seeds the opening that
    all share.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        seeds = list(map(seed_of, self.keys))
        self.episodes = [Record(seed, seeds[row - row % self.num_samples]) for row, seed in enumerate(seeds)]
        self.unasked: set[int] = set()  # rows with a turn that was not sent to the environment
        self.failures: dict[int, Failure] = {}
        self.was_in_vain = False  # the last wait for late rows
        self.prepare()

    def prepare(self) -> None:
        """Is called when all rows are there."""

    def listening(self, sampler: Sampler) -> Sampler:
        return replace(sampler, on_end=self.on_end, on_wait=self.on_wait)

    def prompts(self) -> list[tuple[int, Problem]]:
        """Returns task number and problem of each prompt, with the openings of episodes as messages.

        There is one prompt for each group if its episodes begin alike; if not, one for each row.
        """
        rows = range(len(self.problems))
        if self.env.opens:
            self.unasked |= set(rows)
            for row, outcome in self.ask(set(rows), len(rows)).items():
                if isinstance(outcome, Step):  # after a failure its first turn fails, too
                    self.problems[row] = replace(self.problems[row], messages=outcome.messages)
                    self.episodes[row].said = heard(0, outcome)
        opened = list(zip(self.task_ids, self.problems, strict=True))
        firsts = super().prompts()
        shared = [problem.messages for _, problem in firsts for _ in range(self.num_samples)]
        are_alike = [problem.messages for _, problem in opened] == shared
        return firsts if are_alike else opened

    def on_end(self, turn: Turn) -> None:
        """Takes a turn that has ended; the row waits for what follows."""
        episode = self.episodes[turn.row]
        episode.replies.append(self.reply(turn.row, turn.tokens))
        episode.last_token = int(turn.tokens[-1])
        episode.num_left = -1 if turn.is_truncated and not turn.num_left else turn.num_left
        self.unasked.add(turn.row)
        self.wait.num_tokens += len(turn.tokens)

    def on_wait(self, rows: Set[int], is_idle: bool, seconds: float, num_sampling: int) -> dict[int, Next]:
        """Returns what follows the turns of rows that wait; waits for one if no row can be sampled."""
        if not rows:
            return {}
        may_wait = seconds and (is_idle or not self.was_in_vain)
        found = self.observe(rows, is_idle, WaitForMore(seconds, num_sampling) if may_wait else NO_WAIT)
        self.was_in_vain = not found
        return found

    def reply(self, row: int, turn: Int[np.ndarray, "A"]) -> Reply:
        """Returns a turn as text, with its calls of tools; a model's own form of calls is written as the dialect's."""
        text, dialect = self.text_of(row, turn), DIALECTS.get(self.env.dialect)
        if dialect is None or dialect.is_inline:
            return Reply(text, self.tokenizer.calls(turn, dialect.opening, dialect.closing) if dialect else ())
        form = form_of(self.tokenizer, self.env.dialect)
        calls = read_calls(self.tokenizer, turn, form, self.problems[row].tools)
        if calls and dialect.opening not in text:
            before = self.text_of(row, before_calls(self.tokenizer, turn, form))
            text = before + "".join(dialect.opening + call + dialect.closing for call in calls)
        return Reply(text, calls)

    def observe(self, rows: Set[int], is_blocking: bool, more: WaitForMore = NO_WAIT) -> dict[int, Next]:
        """Returns the observations that have come for these rows, as tokens; `is_blocking`: waits for at least one."""
        outcomes = self.ask(rows, int(is_blocking), more)
        return {row: self.observation(row, outcome) for row, outcome in outcomes.items()}

    def ask(self, rows: Set[int], num_needed: int, more: WaitForMore = NO_WAIT) -> dict[int, Outcome]:
        """Returns the outcomes of these rows' turns that have come; with several processes, all outcomes."""
        if jax.process_count() > 1:
            return self.ask_together(sorted(rows))
        self.send(rows & self.unasked)
        return self.stream.take(rows, num_needed, more)

    def ask_together(self, rows: Sequence[int]) -> dict[int, Outcome]:
        """Returns outcomes of all of these rows; this process sends its share of them."""

        def own_outcomes(share: range) -> list[JSON]:
            own_rows = {rows[i] for i in share}
            self.send(own_rows)
            outcomes = self.stream.take(own_rows, len(own_rows))
            return [outcome_to_json(outcome) for outcome in outcomes.values()]

        results = map(outcome_from_json, self.layout.share(own_outcomes, len(rows)))
        return dict(zip(rows, results, strict=True))

    def send(self, rows: Set[int]) -> None:
        """Sends the last turns of rows to the environment, with one request."""
        self.stream.add({row: (self.task_ids[row], self.episodes[row].turns) for row in sorted(rows)})
        self.unasked -= rows

    def observation(self, row: int, outcome: Outcome) -> Next:
        episode, tokens, stop = self.episodes[row], [], "failed"
        self.add_outcome(row, outcome)
        if isinstance(outcome, Step):
            tokens = [] if outcome.done else self.encode(row, outcome)
            stop = "done" if outcome.done else "max_turns"
        if tokens and len(episode.replies) < self.env.max_turns:
            if len(tokens) < episode.num_left:
                episode.messages.append(outcome.messages)
                return Next(tokens)
            stop = "max_tokens"
        self.wait.done += 1
        if tokens:
            self.unasked.add(row)  # the environment may have a last reward
        episode.stop = "max_tokens" if episode.num_left < 0 else stop
        return Next(finished=episode.stop != "max_tokens")

    def encode(self, row: int, step: Step, tokenizer: Tokenizer | None = None) -> list[int]:
        """Returns the tokens between a turn and the next; a turn that was truncated or ended differently is closed."""
        if step.messages[0]["role"] == INLINE:
            dialect = DIALECTS[self.env.dialect]
            return self.tokenizer.results(step.messages, dialect.result_opening, dialect.result_closing)
        problem, episode = self.problems[row], self.episodes[row]
        bridge = (tokenizer or self.tokenizer).bridge(
            episode.before(problem.messages),
            step.messages,
            thinking=problem.thinking,
            prefix=problem.prefix,
            plain=problem.plain,
            tools=problem.tools,
        )
        return bridge.after(episode.last_token)

    def add_outcome(self, row: int, step: Outcome) -> None:
        """Adds the reward of a turn and the environment's metrics, or the failure of an episode."""
        if isinstance(step, Failure):
            self.failures[row] = step
            return
        episode = self.episodes[row]
        episode.said = heard(episode.said, step)
        episode.scores["return"] += step.reward
        episode.scores.update(step.info)
        if len(episode.turn_rewards) < len(episode.replies):
            episode.turn_rewards.append(step.reward)
        else:  # the last reward of a truncated episode
            episode.turn_rewards[-1] += step.reward

    def finish(self) -> GradedReplies:
        """Requests the last rewards of truncated episodes; returns all rewards, None for failures, and their counts."""
        truncated = set(self.unasked)
        for row, outcome in self.ask(truncated, len(truncated)).items():
            self.add_outcome(row, outcome)
        played = zip(self.task_ids, self.problems, self.episodes, strict=True)
        jobs = [(task, problem.messages + episode.conversation()) for task, problem, episode in played]
        least = {"return": 0.0, "correct_answer": 0.0}
        rewards = [least | {"turns": float(len(episode.replies))} | episode.scores for episode in self.episodes]
        outcomes = [self.failures.get(row, scores) for row, scores in enumerate(rewards)]
        return self.stream.scorer.check_failures(jobs, outcomes)

    def records(self, completions: Completions) -> dict[str, Any]:
        """Returns fields of Episodes: rows, problem, last reply, end, messages, rewards of turns if none failed."""
        rewards = [[] if row in self.failures else episode.turn_rewards for row, episode in enumerate(self.episodes)]
        return {
            "completions": completions,
            "rollout": np.arange(len(self.episodes)),
            "texts": [episode.replies[-1].text for episode in self.episodes],
            "problems": self.problems,
            "stops": [episode.stop for episode in self.episodes],
            "conversations": [episode.conversation() for episode in self.episodes],
            "turn_rewards": rewards,
        }


def seed_of(key: UInt32[np.ndarray, "2"]) -> int:
    """Returns a key as one number."""
    high, low = key.tolist()
    return high << 32 | low
