"""Your own problems: any file of rows or data set of the hub, with a reward from your own Python file.

python core/grpo.py --env_name dataset --env_options path=problems.jsonl --reward my_reward.py:reward
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from envs.base import TURN_DIALECTS, Env, Episode, Problem, check_choice
from envs.data.files import RawRow
from envs.data.messages import (
    CONVERSATIONS,
    PROMPTS,
    WEIGHTS,
    Columns,
    Messages,
    as_messages,
    find_column,
    is_nothing,
    read_exchange,
    read_references,
    unweighted,
    weighted,
)
from envs.data.questions import written_answers, written_trials
from envs.data.rows import Row, Source, first_of, load_rows
from envs.data.splits import select_split
from envs.grading.answers import FORMS, final_answer
from envs.grading.equality import final_reference, same_math
from envs.own.adapters import Adapter, Played
from envs.own.functions import RewardFunctions, is_correct
from envs.own_code import code_files, load_object, read_names
from envs.tools.episode import ToolSettings
from utils.settings.errors import UserError, check_installed, describe_error


class Dataset(Env):
    """Problems from named columns of a file, or of a data set of the hub (forms of rows: envs/data/messages.py).

    Replies are graded by `reward`, or compared with the column `answer` as mathematics. One row in twenty is kept for
    the valid split and, without a `test_path`, one in ten for the test split; rows with a prompt of these are removed.
    With an `episode`, each row is a conversation with an object of that class (envs/own/adapters.py); rows may then
    repeat.
    """

    splits = ("train", "valid", "test")
    makes_prompts = False  # rows need no prompt, and may repeat
    needs_answer = True  # a row without an answer cannot be graded

    def __init__(
        self,
        split: str = "train",
        path: str = "",  # a file, a folder or owner/name on the hub; also FOLDER:config for the last two
        test_path: str = "",
        hub_split: str = "train",
        test_hub_split: str = "test",  # split of test_path
        prompt: str = "",  # column, with dots before nested names (also below); "": prompt, question or messages
        answer: str = "",  # column; need not be there when a reward is given; "": answer, or verl's or Alpaca's
        messages: str = "",  # column of a conversation, whose last reply is the answer if there is no other
        bin: str = "",  # column whose values are the bins of --task_sampling bins
        form: str = "any",  # form of the answer: tags, boxed, hash or any
        reward: str = "",  # FILE.py:FUNCTION, or several separated by commas
        reward_weights: str = "",  # factors of several rewards
        episode: str = "",  # FILE.py:CLASS, for TRL's environment_factory or with reset and step
        max_turns: int = 8,  # turns of an episode
        dialect: str = "qwen",  # form of tool calls: qwen or json
        max_tool_calls: int = 16,
        tool_error_reward: float = 0.0,  # added for each call that fails
        tokens_per_action: int = 512,
        skip_bad_rows: bool = False,
    ):
        if not path:
            raise UserError("the environment dataset needs data: --env_options path=FILE (or owner/name on the hub)")
        check_choice("form", form, FORMS)
        self.form = form
        self.columns = Columns(prompt, answer, messages)
        self.answer_column = answer or "answer"
        self.tokens_per_action = tokens_per_action
        self.rewards = RewardFunctions(reward, reward_weights, self.columns) if reward else None
        self.has_reward = bool(reward)
        self.code = code_files(reward) + code_files(episode)
        self.adapter, self.tools = None, ()
        if episode:
            check_choice("dialect", dialect, TURN_DIALECTS)
            self.set_episodes(episode, max_turns, ToolSettings(dialect, max_tool_calls, error_reward=tool_error_reward))
        self.needs_answer &= not self.has_reward
        tests = self.load(find_source(test_path, test_hub_split), skip_bad_rows) if test_path else None
        if split == "test" and test_path:
            self.rows = tests
        else:
            rows = self.load(find_source(path, hub_split), skip_bad_rows)
            self.rows, selected = select_split(rows, split, 10, tests, may_overlap=self.makes_prompts)
            self.note += selected
        self.num_tasks, self.distinct_rows = len(self.rows), [] if self.makes_prompts else self.rows
        if not self.has_reward:
            check_installed("math_verify", "comparing answers, as without --reward,")
        if reward:
            self.rewards.check(self.rows[0].answer, has_environments=self.opens)
            self.takes_ids = self.rewards.takes_ids
            self.takes_groups = self.rewards.takes_groups and not self.opens
            if self.opens and self.rewards.takes_groups:
                self.note += "; episodes are graded one at a time: a reward that takes lists gets lists of one"
            self.note += "; a reply is correct from a return of 1 on, if the reward has no part correct_answer"
        self.bin_column = bin
        if bin and (place := next((row.place for row in self.rows if not bin_name(row.answer, bin)), "")):
            raise UserError(f"bin={bin}: {place} has no such column, or no value in it: name a column of every row")

    def load(self, source: Source, skip_bad_rows: bool) -> list[Row]:
        """Returns the rows of a source, and notes how many were left out."""
        rows, self.note = load_rows("dataset", source, "", self.read_row, skip_bad_rows, may_repeat=self.makes_prompts)
        return rows

    def set_episodes(self, episode: str, max_turns: int, settings: ToolSettings) -> None:
        """Makes the rows episodes of the class that FILE.py:CLASS names. Raises UserError if it cannot be made."""
        if max_turns < 2:
            raise UserError(f"max_turns={max_turns} is too low for an episode: give 2 or more")
        named, *others = read_names(episode, "--episode", "class")
        if others:
            raise UserError(f"--episode {episode} names several classes: name one")
        self.adapter = Adapter(load_object(named, "--episode", "class"), settings)
        self.max_turns = max_turns
        try:
            has_steps, self.tools, pays = self.adapter.traits()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"objects of --episode {episode} cannot be made or reset ({describe_error(error)}): correct the class"
            ) from error
        self.opens = self.makes_prompts = True
        self.dialect = "" if has_steps else settings.dialect
        self.has_reward = self.has_reward or pays

    def read_row(self, row: RawRow) -> Row:
        """Returns a row whose answer is the row, with prompt and reference in their columns. Raises: ValueError."""
        if self.makes_prompts and self.columns == Columns() and not first_of((*PROMPTS, *CONVERSATIONS), row):
            return Row([{"role": "user", "content": ""}], row)  # the episode writes the whole prompt
        exchange = read_exchange(row, replace(self.columns, needs_answer=self.needs_answer))
        prompt = unweighted(exchange.prompt)
        if exchange.tools and self.tools:
            raise ValueError("it has a column tools, and --episode has tools of its own: remove one")
        if exchange.tools:
            prompt = Messages.of(as_messages(prompt, "user"), exchange.tools)
        given = exchange.answer
        if given is None and exchange.reply:
            given = exchange.reply[-1]["content"]
        row = {**row, exchange.column: prompt}
        if given is not None and find_column(row, self.answer_column) is None:
            row[self.answer_column] = given
        if not self.needs_answer:
            return Row(prompt, row)
        if exchange.reply:
            weighted(row, [*as_messages(exchange.prompt, "user"), *exchange.reply])  # raises for a row to leave out
        elif mark := next((name for name in WEIGHTS if row.get(name) not in (None, 1)), ""):
            raise ValueError(f"its column {mark} is not used without a --reward: remove the column")
        return Row(prompt, row if read_references(given) else None)

    def problem(self, index: int) -> Problem:
        prompt, row, place = self.rows[index]
        tools = getattr(prompt, "tools", ()) or self.tools
        return Problem(as_messages(prompt, "user"), row, tools=tools, place=place)

    def bins(self) -> list[str]:
        return [bin_name(row.answer, self.bin_column) for row in self.rows] if self.bin_column else []

    def episode(self, problem: Problem, seed: int) -> Episode:
        return self.adapter.episode(problem, seed, partial(self.grade, problem))

    def close(self) -> None:
        if self.adapter:
            self.adapter.close()

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        return self.score_group(problem, [text])[0]

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[dict[str, float]]:
        plays = [Played(text, getattr(text, "ids", ())) for text in texts]
        return self.grade_all(problem, plays) if self.rewards else [self.grade(problem, played) for played in plays]

    def grade(self, problem: Problem, played: Played) -> dict[str, float]:
        """Returns the rewards of a reply, or of an episode that has ended. Raises: what a reward raises."""
        if self.rewards:
            return self.grade_all(problem, [played])[0]
        if self.has_reward:
            return {"return": 0.0, "correct_answer": 0.0}  # the episode's class computes the rewards
        answer = final_answer(played.text, self.form)
        correct = float(answer is not None and any(same_math(one, answer) for one in self.references(problem)))
        return {"return": correct, "correct_answer": correct, "format": float(answer is not None)}

    def grade_all(self, problem: Problem, plays: Sequence[Played]) -> list[dict[str, float]]:
        """Returns the user's rewards of replies to a problem; a return of 1 or more is correct."""
        graded = self.rewards.grade(plays, problem.answer)
        return [{"correct_answer": is_correct(scores["return"])} | scores for scores in graded]

    def references(self, problem: Problem) -> list[str]:
        """Returns the answers that are right; none if a reward's answers are neither texts nor numbers."""
        try:
            return read_references(find_column(problem.answer, self.answer_column))
        except ValueError:
            return []

    def examples(self, problem: Problem) -> dict[str, str]:
        reference = final_reference(next(iter(self.references(problem)), ""))
        return {"reference": reference, **written_answers(self.form, reference)} if reference else {}

    def trials(self, problem: Problem) -> list[str]:
        references = [] if self.has_reward else self.references(problem)[:1]
        return [reply for x in references for reply in written_trials(problem, self.form, final_reference(x))]


def bin_name(row: RawRow, column: str) -> str:
    """Returns the name of a row's bin: equal numbers have one; "" if there is no value."""
    value = find_column(row, column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if is_nothing(value) or value != value else str(value)  # NaN differs from itself


def find_source(path: str, hub_split: str) -> Source:
    """Returns the source of a file or folder that exists, or of the hub. Raises UserError for a missing file."""
    file = Path(os.path.expanduser(path))
    if file.is_file():
        return Source((str(file.absolute()),))
    if Path(str(file).partition(":")[0]).is_dir():
        return Source((), str(file.absolute()), hub_split)
    if file.suffix or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(f"there is no file {path}: correct the path")
    return Source((), path, hub_split)
