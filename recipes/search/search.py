"""Search: questions about a corpus of passages, and a tool that finds some of them by their words.

Source: BM25 of Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009; exact match of
SQuAD (Rajpurkar et al., 2016). Without files, corpus and questions are made up.
"""

import os
import random
import re
import string
from array import array
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from envs.base import Episode, Problem, check_choice
from envs.data.files import RawRow, read_file, read_lines
from envs.data.questions import Questions, written_answers
from envs.data.rows import Row, Source, load_rows, text_prompt
from envs.data.splits import select_split
from envs.tools.episode import ToolEpisode, ToolSettings
from utils.settings.errors import UserError

PROMPT = "{question} Search for what you need to know, one fact at a time. Then give the answer, a few words, {form}."
FORMS = {"tags": "between <answer> and </answer>", "boxed": "within \\boxed{}", "hash": "on a last line, after ####"}
WORD = re.compile(r"\w+")
ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_QUERY = 1000  # characters that are read of a query
MAX_ANSWER = 1000  # characters of an answer; a longer one is none

Tokens = Int[np.ndarray, "T"]  # ids of words, passage after passage
Lengths = Int[np.ndarray, "N"]  # words of each passage
Scores = Float[np.ndarray, "N"]  # score of each passage


class Passage(NamedTuple):
    """A piece of the corpus."""

    title: str
    text: str

    @property
    def content(self) -> str:
        """Returns the title, if there is one, and the text."""
        return f"{self.title}: {self.text}" if self.title else self.text


class Search(Questions):
    """Reward 1 for one of the right answers in the last reply, compared as in SQuAD, minus `call_cost` for each call.

    One in ten questions is for the test split, one in twenty for the valid split. All share the corpus.
    """

    splits = ("train", "valid", "test")
    tokens_per_action = 1024
    force_answer_at = -1

    def __init__(
        self,
        split: str = "train",
        corpus: str = "",  # JSONL with "text" and perhaps "title" (or "contents"), or a text file, a passage a line
        questions: str = "",  # a file of rows with "question" and "answer" (text, or a list of texts)
        top_k: int = 3,  # passages in a result
        form: str = "tags",  # form of answers that prompts ask for: tags, boxed or hash
        max_turns: int = 6,
        max_tool_calls: int = 8,
        call_cost: float = 0.0,
        tool_error_reward: float = 0.0,  # added for each call that fails
        skip_bad_rows: bool = False,
    ):
        check_choice("form", form, FORMS)
        if top_k < 1 or max_turns < 2:
            raise UserError("Search needs top_k >= 1 and max_turns >= 2: correct --env_options")
        if bool(corpus) != bool(questions):
            raise UserError(
                "Search needs both files, corpus=FILE and questions=FILE, or none for made-up ones: give both, or "
                "leave both out"
            )
        if corpus:
            passages = read_corpus(Path(os.path.expanduser(corpus)))
            source = Source((str(Path(os.path.expanduser(questions)).absolute()),))
            rows, note = load_rows("search", source, "", read_row, skip_bad_rows)
        else:
            passages, rows = make_world()
            note = f"search: {len(rows)} made-up questions"
        rows, selected = select_split(rows, split, 10)
        super().__init__(rows, f"{note}{selected}; {len(passages):,} passages", form, partial=0.0)
        self.index = Index(passages, top_k)
        self.max_turns = max_turns
        self.dialect = "qwen"
        self.settings = ToolSettings("qwen", max_tool_calls, error_reward=tool_error_reward, call_cost=call_cost)

    def problem(self, index: int) -> Problem:
        question, answers, _ = self.rows[index]
        content = PROMPT.format(question=question, form=FORMS[self.form])
        return Problem([{"role": "user", "content": content}], answers, tools=(self.index.search,))

    def episode(self, problem: Problem, seed: int) -> Episode:
        return ToolEpisode([self.index.search], self.settings, partial(self.score, problem))

    def is_equal(self, reference: list[str], answer: str) -> bool:
        return is_exact_match(answer, reference)

    def examples(self, problem: Problem) -> dict[str, str]:
        return written_answers(self.form, problem.answer[0])


def is_exact_match(answer: str, references: Iterable[str]) -> bool:
    """True if an answer equals one of the references, apart from case, punctuation, articles and white space."""
    if len(answer) > MAX_ANSWER:
        return False
    answer = normalized_answer(answer)
    return bool(answer) and answer in map(normalized_answer, references)


def normalized_answer(text: str) -> str:
    """Returns a text in lower case without punctuation and articles, with single spaces."""
    text = text.lower().translate(NO_PUNCTUATION)
    return " ".join(ARTICLE.sub(" ", text).split())


# the corpus


class Index:
    """Words of a corpus: for each, the passages that have it, with its weight in them."""

    def __init__(self, passages: list[Passage], top_k: int, k1: float = 1.2, b: float = 0.75):
        self.passages = passages
        self.top_k = top_k
        word_ids = defaultdict(count().__next__)  # a new word gets the next number
        tokens = array("q")
        lengths = []
        for passage in passages:
            words = WORD.findall(passage.content.lower())
            tokens.extend(map(word_ids.__getitem__, words))
            lengths.append(len(words))
        self.word_ids = dict(word_ids)
        self.set_weights(np.array(tokens), np.array(lengths), k1, b)

    def set_weights(self, tokens: Tokens, lengths: Lengths, k1: float, b: float) -> None:
        """Sets the weight of each word in each passage.

        BM25: idf x tf / (tf + k1 (1 - b + b length / mean length)), idf = log(1 + (N - n + 1/2) / (n + 1/2)). The word
        stands tf times in a passage, and in n of N passages. The 1 keeps frequent words positive (Lucene).
        """
        num_passages = len(lengths)
        passage_ids = np.repeat(np.arange(num_passages), lengths)
        pairs, counts = np.unique(tokens * num_passages + passage_ids, return_counts=True)
        words = pairs // num_passages
        self.passage_ids = (pairs % num_passages).astype(np.int32)
        self.starts = np.searchsorted(words, np.arange(len(self.word_ids) + 1))
        frequencies = np.diff(self.starts)
        idf = np.log1p((num_passages - frequencies + 0.5) / (frequencies + 0.5))
        penalties = k1 * (1 - b + b * lengths / max(lengths.mean(), 1))
        self.weights = idf[words] * counts / (counts + penalties[self.passage_ids])

    def scores(self, query: str) -> Scores:
        """Returns the score of each passage; a word that the query has twice counts twice."""
        scores = np.zeros(len(self.passages))
        for word in WORD.findall(query[:MAX_QUERY].lower()):
            if word in self.word_ids:
                word_id = self.word_ids[word]
                part = slice(self.starts[word_id], self.starts[word_id + 1])
                scores[self.passage_ids[part]] += self.weights[part]
        return scores

    def best(self, query: str) -> list[int]:
        """Returns the numbers of the best passages that have a word of the query; of equal ones the first is better."""
        scores = self.scores(query)
        candidates = np.flatnonzero(scores)
        order = np.argsort(-scores[candidates], kind="stable")
        return candidates[order[: self.top_k]].tolist()

    def search(self, query: str) -> str:
        """
        Searches the corpus, and returns the passages that fit best.

        Args:
            query: A few words that the passage should have.
        """
        best = self.best(str(query))
        lines = [f"{rank}. {self.passages[i].content}" for rank, i in enumerate(best, 1)]
        return "\n".join(lines) or "no passage has any of these words"


def read_corpus(path: Path) -> list[Passage]:
    """Returns the passages of a file: rows of JSONL, CSV or Parquet, or the lines of a text file.

    Raises: UserError for a file that is not there, for a row without a text, and if there is no passage.
    """
    if not path.is_file():
        raise UserError(f"corpus={path} names no file: correct the path")
    if path.suffix in (".txt", ""):
        passages = [Passage("", line.decode("utf-8", "replace")) for _, line in read_lines(path)]
    else:
        passages = [read_passage(location, row) for location, row in read_file(path)]
    if not passages:
        raise UserError(f"corpus={path} holds no passage: write one a line")
    return passages


def read_passage(location: str, row: RawRow | Exception) -> Passage:
    """Returns the passage in a row. Raises: UserError for one without a text."""
    if isinstance(row, Exception):
        raise UserError(f"{location} is malformed: {row}")
    text = row.get("text") or row.get("contents")
    if not isinstance(text, str):
        raise UserError(f'{location} has no "text" or "contents": add one of them')
    return Passage(str(row.get("title") or ""), text)


def read_row(row: RawRow) -> Row:
    """Returns the question in a row, and its answers."""
    answers = row["answer"]
    if not isinstance(answers, list):
        answers = [answers]
    answers = [str(answer) for answer in answers if isinstance(answer, str | int | float)]
    return Row(text_prompt(row["question"]), list(filter(normalized_answer, answers)) or None)


# a made-up world

SYLLABLES = "ba bel dor dra el fen gar hal il ka kes lo mar mi nor o pa rin sa tar ul ven wi zo".split()
WORKS = "baker carpenter doctor engineer farmer glassblower lawyer painter sailor tailor teacher weaver".split()
FAMES = "bridges castle cheese festival fountains gardens harbour library market mines museum towers".split()
NUM_TOWNS = 40
NUM_PEOPLE = 400


def make_world() -> tuple[list[Passage], list[Row]]:
    """Returns passages about towns and people, and questions about one fact or two: always the same ones."""
    rng = random.Random("search")
    names = make_names(rng, NUM_TOWNS + 2 * NUM_PEOPLE)
    regions = make_names(rng, 8)
    towns, people = {}, {}
    for i in range(NUM_TOWNS):
        mayor = f"{names.pop()} {names.pop()}"  # not among the people
        towns[names.pop()] = regions[i % 8], rng.choice(FAMES), mayor
    for _ in range(NUM_PEOPLE):
        name = f"{rng.choice(names)} {rng.choice(names)}"
        people[name] = rng.choice(WORKS), rng.choice(list(towns)), rng.randint(1850, 1999)
    passages, rows = [], []
    for name, (region, fame, mayor) in towns.items():
        text = f"a town in the region of {region}, known for its {fame}. Its mayor is {mayor}."
        passages.append(Passage(name, text))
    for name, (work, town, year) in people.items():
        passages.append(Passage(name, f"by occupation {work}, born in {town} in {year}."))
        region, fame, mayor = towns[town]
        birthplace = f"the town where {name} was born"
        rows += [
            Row(f"What is the occupation of {name}?", [work]),
            Row(f"In which year was {name} born?", [str(year)]),
            Row(f"In which region is {birthplace}?", [region]),
            Row(f"Who is the mayor of {birthplace}?", [mayor]),
            Row(f"For what is {birthplace} known?", [f"its {fame}", fame]),
        ]
    rng.shuffle(passages)
    rng.shuffle(rows)
    return passages, rows


def make_names(rng: random.Random, num_names: int) -> list[str]:
    """Returns different names of two to four syllables."""
    names = {}
    while len(names) < num_names:
        syllables = rng.choices(SYLLABLES, k=rng.randint(2, 4))
        names["".join(syllables).capitalize()] = None
    return list(names)
