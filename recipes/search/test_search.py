"""The environment search: its index against the formula, its grader, and an episode played by a script."""

import json
import math
import random
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from envs import make_env
from envs.base import Env, Problem, Reply, Step
from envs.scoring.worker import EpisodeCache, Turns
from recipes.search.search import Index, Passage, is_exact_match
from utils.settings.errors import UserError


def okapi(texts: list[str], query: str, k1: float, b: float) -> list[float]:
    """Returns the scores of texts, one after the other, in words of the letters a to z."""
    documents = [Counter(text.split()) for text in texts]
    mean_length = sum(document.total() for document in documents) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query.split():
            num_with_word = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - num_with_word + 0.5) / (num_with_word + 0.5))
            length_norm = 1 - b + b * document.total() / mean_length
            score += idf * document[word] / (document[word] + k1 * length_norm)
        scores.append(score)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (1.5, 0.0), (2.0, 1.0)])
def test_scores_are_those_of_the_formula(k1, b):
    rng = random.Random(k1)
    for _ in range(100):
        texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(1, 12))) for _ in range(rng.randint(1, 30))]
        index = Index([Passage("", text) for text in texts], top_k=5, k1=k1, b=b)
        query = " ".join(rng.choices("abcdefghij", k=rng.randint(1, 6)))
        expected = okapi(texts, query, k1, b)
        np.testing.assert_allclose(index.scores(query), expected, rtol=1e-12, atol=1e-12)
        best = [expected[i] for i in index.best(query)]
        np.testing.assert_allclose(best, sorted(filter(None, expected), reverse=True)[:5], rtol=1e-12)


def test_results_have_titles_and_numbers_and_equal_ones_are_in_order():
    index = Index([Passage("Bela", "A town."), Passage("", "The town of Élan."), Passage("x", "y")], 2)
    assert index.search("TOWN élan") == "1. The town of Élan.\n2. Bela: A town."
    assert index.search("bela?") == "1. Bela: A town."
    passages = [Passage("", text) for text in ("b", "a a", "a a", "c", "a a", "a")]
    assert Index(passages, 3).best("a") == [1, 2, 4]


HOSTILE = ["", "?", "\0", "\ud800", "zzz" * 30_000, "x\u0301" * 50_000, "(" * 10**5]


@pytest.mark.parametrize("query", [*HOSTILE, "q" * 1000 + " {word}"])
def test_hostile_and_long_queries_find_nothing_at_once(query):
    index = make_env("search").index
    word = index.passages[0].title.split()[0]
    start = time.process_time()
    assert index.search(query.replace("{word}", word)) == "no passage has any of these words"
    assert word in index.search(f"{word} " * 20_000)
    assert time.process_time() - start < 0.2


MATCHES = [
    ("The  Eiffel-Tower.", ["eiffeltower"], True),
    ("a cat and the dog", ["Cat, and dog!"], True),
    ("Theatre", ["atre"], False),
    ("1889", ["1888", "1889"], True),
    ("in 1889", ["1889"], False),
    ("the", ["a"], False),
    ("x" * 10**6, ["x" * 10**6], False),
]


@pytest.mark.parametrize(("answer", "references", "is_match"), MATCHES, ids=range(len(MATCHES)))
def test_answers_match_as_in_squad(answer, references, is_match):
    assert is_exact_match(answer, references) == is_match


# episodes


def call(query: str) -> Reply:
    payload = json.dumps({"name": "search", "arguments": {"query": query}})
    return Reply("", (payload,))


PATTERNS = {
    "occupation": "by occupation (.*?),",
    "year": r"in (\d+)\.",
    "region": "the region of (.*?),",
    "mayor": r"mayor is (.*?)\.",
    "known": r"known for (its .*?)\.",
}


def research(env: Env, problem: Problem) -> list[Reply]:
    """Returns the replies of a policy that searches for the person, and then for a town where one is asked for."""
    episode = env.episode(problem, 0)
    question = problem.messages[0]["content"].split("?")[0]
    asked = next(word for word in PATTERNS if word in question)
    queries = [re.search(r"(?:of|was|where) ((?!the )[A-Z]\w+ [A-Z]\w+)", question)[1]]
    replies = []
    for query in queries:
        replies.append(call(query))
        first = episode.act(replies[-1]).messages[0]["content"].splitlines()[0]
        if "the town where" in question and len(queries) == 1:
            town = re.search("born in (.*) in", first)[1]
            queries.append(f"{asked} of the town {town}")
    answer = re.search(PATTERNS[asked], first)[1]
    return [*replies, Reply(f"I know: <answer>{answer}</answer>")]


@pytest.mark.parametrize("split", ["", "-valid", "-test"])
def test_one_search_or_two_find_the_answer(split):
    env = make_env(f"search{split}", call_cost=0.125)
    lengths = set()
    for i in range(60):
        problem = env.problem(i)
        replies = research(env, problem)
        episode = env.episode(problem, 0)
        steps = [episode.act(reply) for reply in replies]
        assert steps[-1].info == {"tool_calls": 0, "tool_errors": 0, "correct_answer": 1.0, "format": 1.0}
        assert sum(step.reward for step in steps) == 1 - 0.125 * (len(replies) - 1)
        turns = Turns(0, tuple(replies[:2]))
        assert EpisodeCache().play(env, env.problem, i, turns) == steps[1]
        lengths.add(len(replies))
    assert lengths == {2, 3}


# files


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def questions(tmp_path) -> str:
    rows = [{"question": f"Where is thing {i}?", "answer": ["here", f"place {i}"]} for i in range(60)]
    return write(tmp_path / "questions.jsonl", *rows, {"question": "How many?", "answer": 3})


@pytest.mark.parametrize("kind", ["jsonl", "contents.jsonl", "txt"])
def test_files_are_read(kind, tmp_path, questions):
    texts = [f"Thing {i} is at place {i}." for i in range(60)]
    rows = {
        "jsonl": [{"title": "", "text": text} for text in texts],
        "contents.jsonl": [{"id": "1", "contents": text} for text in texts],
        "txt": ["", *texts],
    }
    corpus = write(tmp_path / f"corpus.{kind}", *rows[kind])
    env = make_env("search", corpus=corpus, questions=questions, top_k=1)
    assert env.note.endswith("60 passages")
    number = re.search("[0-9]+", env.problem(0).messages[0]["content"])[0]
    episode = env.episode(env.problem(0), 0)
    step = episode.act(call(f"thing {number}"))
    content = f"1. Thing {number} is at place {number}."
    assert step == Step([{"role": "tool", "content": content}], info={"tool_calls": 1, "tool_errors": 0})
    assert episode.act(Reply(f"<answer>Place {number}</answer>")).reward == 1.0


def test_mistakes_are_named(tmp_path, questions):
    corpus = write(tmp_path / "corpus.jsonl", {"title": "no text"})
    for options, message in (
        ({"questions": questions}, "needs both files"),
        ({"corpus": corpus, "questions": questions}, 'corpus.jsonl:1 has no "text" or "contents"'),
        ({"corpus": "none.jsonl", "questions": questions}, "corpus=none.jsonl names no file"),
        ({"corpus": write(tmp_path / "c.jsonl", "{"), "questions": questions}, "c.jsonl is not JSON"),
        ({"corpus": write(tmp_path / "c.txt"), "questions": questions}, "holds no passage"),
        ({"top_k": 0}, "top_k >= 1"),
        ({"form": "any"}, "form=any: choose one of tags, boxed, hash"),
    ):
        with pytest.raises(UserError, match=message):
            make_env("search", **options)
