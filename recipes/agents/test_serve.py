"""The endpoint of a model: what it samples, what goes on in a row of the cache, and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("uvicorn")

from models import decoder  # noqa: E402
from models.checkpoint import load_model  # noqa: E402
from recipes.agents.serve import ServeConfig  # noqa: E402
from tests.helpers import ROOT  # noqa: E402
from utils.devices.sharding import single_device  # noqa: E402
from utils.settings.errors import UserError  # noqa: E402

TINY = ROOT / "models/tiny"
ASKED = [{"role": "user", "content": "Use 3 4 7 to make 14."}]
ROWS, CONTEXT = 6, 320


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "recipes/agents/serve.py", "--model_dir", TINY, "--port", "0"]
    command += ["--context", CONTEXT, "--rows", ROWS, "--dialect", "qwen"]
    process = subprocess.Popen(
        [*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    yield re.search(r"(http://\S+)/v1", process.stdout.readline())[1]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def post(url: str, path: str, body: object, key: str = "") -> dict:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


@pytest.fixture
def chat(url):
    def chat(messages: list = ASKED, key: str = "", **fields: object) -> dict:
        body = {"messages": messages, "max_tokens": 24, "logprobs": True, "return_token_ids": True, **fields}
        return post(url, "/v1/chat/completions", body, key)

    return chat


@pytest.fixture(scope="module")
def logprobs_of():
    """Log-probabilities of all next tokens along a row, by the model as training computes it."""
    model, params, _ = load_model(TINY, single_device())

    @partial(jax.jit, static_argnums=0)
    def forward(model, params, tokens, temperature):
        hidden = decoder.forward(model, params, tokens)
        return jax.nn.log_softmax(decoder.head(model, params, hidden)[0] / temperature)

    def logprobs_of(row: list[int], temperature: float = 1.0) -> np.ndarray:
        return np.asarray(forward(model, params, jnp.array([row]), temperature))

    return logprobs_of


def tokens_of(answer: dict) -> tuple[list[int], list[int], np.ndarray]:
    (choice,) = answer["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return answer["prompt_token_ids"], choice["token_ids"], np.array(logprobs)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.0])
def test_log_probabilities_are_of_what_was_sampled(chat, logprobs_of, temperature):
    answer = chat(temperature=temperature, top_logprobs=5, seed=1)
    prompt, ids, logprobs = tokens_of(answer)
    expected = logprobs_of([*prompt, *ids], temperature or 1.0)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(logprobs, expected[np.arange(len(ids)), ids], atol=1e-4)
    if temperature == 0:
        assert ids == expected.argmax(axis=1).tolist()
    for token, row in zip(answer["choices"][0]["logprobs"]["content"], expected, strict=True):
        found = {int(top["token"].removeprefix("token_id:")): top["logprob"] for top in token["top_logprobs"]}
        assert len(found) == 5
        np.testing.assert_allclose(sorted(found.values()), np.sort(row)[-5:], atol=1e-4)


def test_a_conversation_goes_on_behind_its_own_tokens(chat, logprobs_of):
    first = chat(key="a", seed=5)
    prompt, ids, _ = tokens_of(first)
    said = [*ASKED, first["choices"][0]["message"], {"role": "user", "content": "Use 2 5 to make 10."}]
    row, ids, logprobs = tokens_of(chat(said, key="a"))
    assert row[: len(prompt) + len(tokens_of(first)[1])] == prompt + tokens_of(first)[1]
    expected = logprobs_of([*row, *ids])[len(row) - 1 : -1]
    np.testing.assert_allclose(logprobs, expected[np.arange(len(ids)), ids], atol=1e-4)
    again = chat(said, key="another")  # which has not seen it: rendered by the template
    assert tokens_of(again)[0][: len(prompt)] == prompt


def test_seeds_repeat_whatever_else_is_sampled(chat):
    alone = [tokens_of(chat(seed=seed, temperature=1.0))[1] for seed in range(ROWS)]

    def one(seed: int) -> list[int]:  # half of them from another distribution, with which they share the rows
        return tokens_of(chat(key=str(seed), seed=seed, temperature=1.0 if seed % 2 else 0.7))[1]

    with ThreadPoolExecutor(ROWS) as pool:
        together = list(pool.map(one, range(ROWS)))
    assert together[1::2] == alone[1::2]
    assert len({tuple(tokens_of(chat())[1]) for _ in range(4)}) > 1, "without a seed each differs"


def test_more_conversations_than_rows(chat):
    """The one that was not used for longest loses its row, and is rendered again if it goes on."""
    first = chat(key="first")
    for i in range(2 * ROWS):
        chat(key=f"key {i}")
    said = [*ASKED, first["choices"][0]["message"], {"role": "user", "content": "Again."}]
    assert tokens_of(chat(said, key="first"))[1]


def test_stop_texts_and_several_choices(chat):
    answer = chat(n=3, stop=["\n"], max_tokens=64)
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        text = (choice["message"].get("reasoning_content") or "") + (choice["message"]["content"] or "")
        assert "\n" not in text
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])


def test_completions_echo_their_prompt(url, logprobs_of):
    body = {"prompt": [[5, 6, 7, 8], [9, 10]], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    answer = post(url, "/v1/completions", body | {"return_token_ids": True})
    assert len(answer["choices"]) == 2
    for prompt, choice in zip(body["prompt"], answer["choices"], strict=True):
        row = prompt + choice["token_ids"]
        expected = logprobs_of(row)[:-1]
        found = choice["logprobs"]
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        np.testing.assert_allclose(found["token_logprobs"][1:], expected[np.arange(len(row) - 1), row[1:]], atol=1e-4)
        np.testing.assert_allclose([max(top.values()) for top in found["top_logprobs"][1:]], expected.max(1), atol=1e-4)
    text = post(url, "/v1/completions", {"prompt": "Use 3 4", "max_tokens": 0, "echo": True})["choices"][0]["text"]
    assert text == "Use 3 4"


def test_ids_in_and_ids_out(url):
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "logprobs": 1}}
    answer = post(url, "/inference/v1/generate", body)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert 1 <= len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 5


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1 " * 400}]}, "context length"),
        ("/v1/completions", {"prompt": [5] * 400}, "context length"),
        ("/v1/completions", {"prompt": [10**6]}, "ids that the model does not have"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|im_end|>"}]}, "spells"),
        ("/v1/chat/completions", b"{", "no JSON"),
    ],
)
def test_what_is_refused_leaves_the_others(url, chat, path, body, reason):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(url, path, body)
    assert error.value.code == 400
    assert reason in error.value.read().decode()
    assert chat()["choices"]


def test_the_card_says_how_long_a_conversation_may_be(url):
    with urllib.request.urlopen(url + "/v1/models") as answer:
        (card,) = json.loads(answer.read())["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", CONTEXT)


def test_other_machines_need_a_key():
    with pytest.raises(UserError, match="--api_key"):
        ServeConfig(host="0.0.0.0")
    ServeConfig(host="0.0.0.0", api_key="secret")
