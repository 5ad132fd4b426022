"""Serves a model to programs that talk to OpenAI's endpoint, or to vLLM's: chats, completions, ids in and ids out.

    python recipes/agents/serve.py --model_dir runs/demo --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Use 3 4 7 to make 14."}]}'

A conversation that goes on is continued in its row of the cache: only what is new is encoded and computed. Requests
beyond the rows wait, first come, first served. The server listens on localhost only, unless --host is given, which
needs a key for callers in the variable LMPO_API_KEY.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)
    from recipes.agents.agent import check_packages
    from utils.settings.errors import user_errors

    with user_errors():
        check_packages("the endpoint")

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from threading import Event
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from core.chains.turns import Record, form_of
from core.chat.models import ChatModelConfig, load_last, prompt_styles
from core.sampler import Next, SamplingConfig, Scheduler, make_sampler
from envs.base import Env, Problem
from envs.tools.calls import FORMS
from models import decoder
from models.architecture import Decoder
from models.distribution import MAX_SUPPORT, Distribution, softmax_outputs
from models.memory import pages_that_fit, sampling_room
from models.names import Array, Policy
from models.tokenizer import GENERATION_CONFIG, Tokenizer
from recipes.agents.endpoint import FULL, LOCAL, Asked, Endpoint, Session
from recipes.agents.protocol import MAX_TOP, PATHS, BadRequest, Request, Sampled
from recipes.agents.rollouts import RequestedRows
from utils.batching import bucket
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.devices.threads import LAUNCHING
from utils.metrics.terminal import Wait
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors
from utils.settings.groups import ComputeConfig
from utils.settings.options import group, option
from utils.threefry import make_key, threefry

GREEDY = 1e-5  # a temperature below it is 0, as in vLLM
DIALECT = "qwen"  # calls of tools are read as the chat template writes them


@dataclass(frozen=True)
class ServeConfig:
    """Server."""

    port: int = option(8000, "Port; 0: a free one", essential=True)
    host: str = option("127.0.0.1", "Address; another one than of this machine needs a key, in LMPO_API_KEY")
    context: int = option(4096, "Maximum context length, in tokens", essential=True)
    rows: int = option(32, "Conversations whose cache is kept, at most; further requests wait")
    temperature: float = option(
        -1.0, "Temperature of requests that set none; -1: that of the model's generation_config.json, or 1"
    )

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port {self.port} is not a port: give 1 to 65535, or 0")
        if self.host not in LOCAL and not self.api_key:
            raise UserError(f"--host {self.host} lets other machines in: set LMPO_API_KEY to a key that they must have")
        if self.context < 2 or self.rows < 1:
            raise UserError("--context must be at least 2, and --rows at least 1: raise the lower one")

    @property
    def api_key(self) -> str:
        """Returns the key that callers must have; keys that begin with it are sessions of their own."""
        return os.environ.get("LMPO_API_KEY", "")


@dataclass(frozen=True)
class ServeCommand:
    """A model behind an endpoint."""

    serve: ServeConfig = group(ServeConfig)
    model: ChatModelConfig = group(ChatModelConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)


@dataclass(frozen=True)
class Unrecorded(Distribution):
    """A distribution whose candidates are not recorded: rows of different distributions share a chain."""

    def support_size(self, vocab_size: int) -> int:
        return 0

    def draw(self, logits: Array, uniforms: Array) -> tuple[Array, Array, Array]:
        distribution = Distribution(self.temperature, self.top_k, self.top_p, self.min_p)
        token, logprob, ids = distribution.draw(logits, uniforms)
        return token, logprob, ids[:, :0]

    def outputs(self, logits: Array, tokens: Array, *_) -> "Scored":
        logits = logits / (self.temperature or 1.0)
        if self.temperature > 0 and not self.is_whole:
            top, ids = self.candidates(logits)
            top = jax.nn.log_softmax(top)
        else:
            top, ids = jax.lax.top_k(jax.nn.log_softmax(logits), min(MAX_TOP, logits.shape[-1]))
        return Scored(softmax_outputs(logits, tokens).logprobs, None, top[..., :MAX_TOP], ids[..., :MAX_TOP])


class Scored(NamedTuple):
    """Outputs for the tokens of rows [B, T]: their log-probabilities, and the likeliest candidates of each."""

    logprobs: Array  # of the softmax at the temperature
    values: None  # there is no critic
    top: Array  # log-probabilities of the distribution, [B, T, K]; -inf: cannot be sampled
    ids: Array


score = jax.jit(decoder.token_outputs, static_argnums=(0, 3))


class ModelEndpoint(Endpoint):
    """Answers requests; rows of the cache belong to the conversations that were used last."""

    paths = PATHS
    stops_work = True

    def __init__(
        self, name: str, serve: ServeConfig, num_rows: int, model: Decoder, params: Policy, default: Unrecorded
    ):
        super().__init__(name, DIALECT, num_places=num_rows, host=serve.host, port=serve.port)
        self.api_key, self.num_rows = serve.api_key, num_rows
        self.model, self.params, self.default = model, params, default

    def take_row(self, session: Session) -> int:
        """Returns a row that is free, or that of the conversation that was not used for longest."""
        free = [row for row in range(self.num_rows) if row not in self.dialogues]
        return next(iter([*free, *[row for row, dialogue in self.dialogues.items() if not dialogue.asked]]))

    def session_of(self, key: str) -> Session:
        if not key.startswith(self.api_key):
            raise BadRequest("the key is wrong", status=401)
        return Session(key)

    def distribution_of(self, request: Request) -> Unrecorded:
        try:
            return distribution_with(self.default, request.model_dump(), self.model.vocab_size)
        except UserError as error:
            raise BadRequest(str(error).replace("--", "")) from error

    def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Returns the ids of a prompt. Raises: BadRequest for one that is too long, and for ids without a token."""
        ids = [*self.tokenizer.first_ids, *self.tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
        if not ids or not 0 <= min(ids) <= max(ids) < self.model.vocab_size:
            raise BadRequest("prompt has no tokens, or ids that the model does not have", "prompt")
        if len(ids) >= self.context:
            raise BadRequest(FULL, "prompt")
        return ids

    async def with_top(self, request: Request, sampled: Sampled) -> Sampled:
        """Adds the likeliest candidates of each token, of the distribution that it was sampled from.

        With `echo` the prompt has some too, and all are of the softmax at temperature 1.
        """
        if request.num_top < (0 if request.echo else 1):
            return sampled
        row = [*sampled.prompt_ids, *sampled.ids]
        tokens = np.zeros((1, bucket(len(row))), np.int32)
        tokens[0, : len(row)] = row
        distribution = Unrecorded() if request.echo else self.distribution_of(request)

        def compute() -> Scored:
            with LAUNCHING:
                found = score(self.model, self.params, tokens, distribution)
            return jax.tree.map(lambda x: np.asarray(x[0, : len(row)]), found)

        found = await asyncio.get_running_loop().run_in_executor(None, compute)
        start = 0 if request.echo else len(sampled.prompt_ids)
        pairs = zip(found.ids[start:].tolist(), found.top[start:].tolist(), strict=True)
        top = [dict(zip(*each, strict=True)) for each in pairs]
        if request.echo:
            return sampled._replace(logprobs=found.logprobs.tolist(), top=top)
        sampled_ones = zip(top, sampled.ids, sampled.logprobs, strict=True)
        return sampled._replace(top=top, logprobs=[known.get(i, logprob) for known, i, logprob in sampled_ones])


class ServedRows(RequestedRows):
    """Rows of a server, without an end: one that a new conversation takes begins anew. Keys are of requests' seeds."""

    def __init__(self, host: ModelEndpoint, tokenizer: Tokenizer, blank: Problem, seed: int):
        self.host, self.tokenizer, self.blank, self.key, self.numbers = host, tokenizer, blank, make_key(seed), count()
        self.env, self.longest_prompt, self.wait = Env(), host.context - 1, Wait("")
        self.env.dialect = DIALECT
        self.problems, self.episodes = [blank] * host.num_rows, [Record(0)] * host.num_rows
        self.unasked, self.was_in_vain = set(), False
        self.prepare()

    def opening(self, row: int, asked: Asked) -> Next:
        self.problems[row], self.episodes[row] = self.blank, Record(0)
        return super().opening(row, asked)

    def key_of(self, row: int) -> UInt32[np.ndarray, "2"]:
        asked = self.asked[row]
        seed, number = asked.request.seed, asked.index
        key, number = (self.key, next(self.numbers)) if seed is None else (make_key(seed), number)
        words = np.asarray(jax.random.key_data(key))
        return np.concatenate(threefry((words[:1], words[1:]), np.array([number])))


def distribution_with(default: Unrecorded, given: Mapping[str, float | None], vocab_size: int) -> Unrecorded:
    """Returns a distribution with those of these values that are not None; a top_k of the vocabulary's size is none.

    Raises: UserError for values that cannot be sampled.
    """
    names = "temperature", "top_k", "top_p", "min_p"
    found = {name: given[name] for name in names if given.get(name) is not None}
    if 0 < found.get("temperature", 1) < GREEDY:
        found["temperature"] = 0.0
    if not 0 <= found.get("top_k", 0) < vocab_size:
        found["top_k"] = 0
    return replace(default, **found)


def default_distribution(tokenizer: Tokenizer, vocab_size: int) -> Unrecorded:
    """Returns the distribution of requests that name none, of generation_config.json: a top_k too large is lowered."""
    given = {"top_k": 0} | json.loads(tokenizer.files.get(GENERATION_CONFIG, b"{}"))
    if 0 < (given["top_k"] or 0) < vocab_size:
        given["top_k"] = min(given["top_k"], MAX_SUPPORT)
    return distribution_with(Unrecorded(), given, vocab_size)


def main(config: ServeCommand) -> None:
    """Loads the model, and serves it until Ctrl-C."""
    layout, serve = make_layout(config.devices, config.model.model_dir), config.serve
    model, params, tokenizer = load_last(config.model.model_dir, config, layout)
    context, distribution = min(serve.context, model.num_positions), default_distribution(tokenizer, model.vocab_size)
    if serve.temperature >= 0:
        distribution = distribution_with(distribution, {"temperature": serve.temperature}, model.vocab_size)
    sampler = make_sampler(SamplingConfig(), model, tokenizer, layout, 1)
    rollout, room = sampling_room(model, layout, params, bucket(context))
    paging = pages_that_fit(room, model, rollout, sampler.paging, context, serve.rows)
    sampler = replace(
        sampler.on(rollout), paging=paging, distribution=Unrecorded(), max_new_tokens=context,
        max_prompt_tokens=0,  # a prompt is among the tokens of its row
    )  # fmt: skip
    num_rows, name = min(serve.rows, paging.num_slots), Path(config.model.model_dir).name
    ((thinking, _),) = prompt_styles([tokenizer], config.model.thinking)
    endpoint = ModelEndpoint(name, serve, num_rows, model, params, distribution)
    endpoint.context = context
    served = ServedRows(endpoint, tokenizer, Problem([], None, thinking=thinking), config.model.seed)
    keys = np.zeros((num_rows, 2), np.uint32)  # requests bring their own
    scheduler = Scheduler(served.listening(sampler), sampler.load_weights(params), [[]] * num_rows, keys)
    form = form_of(tokenizer, DIALECT)
    calls = f"calls of tools as {next(key for key, x in FORMS.items() if x is form)}" if form else "no tools"
    sampled = f"temperature {distribution.temperature:g}, top_p {distribution.top_p:g}, top_k {distribution.top_k}"
    with endpoint:
        print(f"{name}: http://{serve.host}:{endpoint.port}/v1, {num_rows} conversations of up to {context:,} tokens, "
              f"{sampled} by default, {calls} (Ctrl-C ends)", flush=True)  # fmt: skip
        try:
            scheduler.run(Event())
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(ServeCommand, sys.argv[1:], __doc__, aliases={"ckpt_dir": "model_dir"}))
