"""Serves a model to programs that talk to OpenAI's endpoint, or to vLLM's: chats, completions, ids in and ids out.

    python recipes/agents/serve.py --model_dir runs/demo --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Use 3 4 to make 7."}]}'

A conversation that goes on is continued in its row of the cache: only what is new is encoded and computed. A sampled
token's log-probability is that of the distribution it was sampled from. The server answers this machine only, unless
--host and --api_key are given.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from core.chains.pages import LaunchedSegment, with_pages
from core.chains.turns import Observation, Record
from core.chat.models import ChatModelConfig, load_last, prompt_styles
from core.sampler import ChainJob, Sampler, SamplingConfig, make_sampler
from envs.base import DIALECTS, TURN_DIALECTS, Env, Problem
from models import decoder
from models.architecture import Decoder
from models.distribution import Distribution
from models.memory import pages_that_fit, sampling_room
from models.names import Array, Policy, Weights
from models.tokenizer import Tokenizer
from recipes.agents.protocol import (
    BadRequest,
    ChatRequest,
    Sampled,
    chat_answer,
    completion_answer,
    generate_answer,
    model_list,
    read_chat,
    read_completion,
    read_generate,
)
from recipes.agents.rollouts import AgentConversations, ProgramChain
from recipes.agents.server import JSON, Caller, Denied, Payload, Server
from recipes.agents.sessions import FULL, Asked, Book, Dialogue, Session
from utils.batching import bucket
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.devices.threads import LAUNCHING
from utils.metrics.terminal import Wait
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors
from utils.settings.groups import ComputeConfig
from utils.settings.options import group, option
from utils.threefry import make_key, threefry

SCORED = 128  # columns whose logits are computed at once
MAX_TOP = 20


@dataclass(frozen=True)
class ServeConfig:
    """Server."""

    port: int = option(8000, "Port; 0: a free one", essential=True)
    host: str = option("127.0.0.1", "Address; another one than of this machine needs --api_key")
    api_key: str = option("", "Key that callers must have; keys that begin with it are sessions of their own")
    context: int = option(4096, "Most tokens of a conversation", essential=True)
    rows: int = option(32, "Conversations whose cache is kept, at most")
    dialect: str = option("", "Form of tool calls; empty: as the chat template writes them", ["", *TURN_DIALECTS])

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise UserError(f"--port {self.port} is no port: give 1 to 65535, or 0")
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_key:
            raise UserError(f"--host {self.host} lets other machines in: give a key that they must have, --api_key")
        if self.context < 2 or self.rows < 1:
            raise UserError("--context must be at least 2, and --rows at least 1: raise the lower one")


@dataclass(frozen=True)
class ServeCommand:
    """A model behind an endpoint."""

    serve: ServeConfig = group(ServeConfig)
    model: ChatModelConfig = group(ChatModelConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)


class Endpoint(Book):
    """Answers requests; rows of the cache belong to the conversations that were used last."""

    def __init__(self, config: ServeConfig, name: str, num_rows: int, dialect: str, scorer: "TokenScorer"):
        self.config, self.name, self.scorer = config, name, scorer
        handlers = {
            "GET /v1/models": self.models,
            "POST /v1/chat/completions": self.chat,
            "POST /v1/completions": self.complete,
            "POST /inference/v1/generate": self.generate,
        }
        super().__init__(Server(handlers, config.host, config.port), DIALECTS[dialect])
        self.rows: OrderedDict[int, tuple[Session, Dialogue] | None] = OrderedDict.fromkeys(range(num_rows))
        self.numbers = count(1)

    def take_row(self, session: Session) -> int:
        """Returns a row that is free, or that of the conversation that was not used for longest."""
        free = [row for row, owner in self.rows.items() if owner is None or not owner[1].pending]
        if not free:
            raise BadRequest(f"all {len(self.rows)} conversations wait for a reply: ask again later, or raise --rows")
        owner = self.rows[free[0]]
        if owner and owner[1] in owner[0].dialogues:
            owner[0].dialogues.remove(owner[1])
        return free[0]

    def ask(self, session: Session, dialogue: Dialogue, asked: Asked) -> None:
        self.rows[dialogue.row] = session, dialogue
        self.rows.move_to_end(dialogue.row)
        super().ask(session, dialogue, asked)

    def session_of(self, caller: Caller) -> Session:
        """Returns the session of a caller's key. Raises: Denied for a key that does not begin with --api_key."""
        if not caller.key.startswith(self.config.api_key):
            raise Denied("the key is wrong")
        if caller.key not in self.sessions:
            self.sessions = {key: session for key, session in self.sessions.items() if session.dialogues}
        return self.sessions.setdefault(caller.key, Session(caller.key))

    async def replies(self, caller: Caller, request: ChatRequest) -> tuple[list, list[Sampled]]:
        session = self.session_of(caller)
        asked = []
        for _ in range(request.n):
            asked += [asyncio.ensure_future(self.reply_to(session, request, caller.is_retry))]
            await asyncio.sleep(0)  # each takes its row before the next
        said, sampled = zip(*await asyncio.gather(*asked), strict=True)
        if request.top_logprobs > 0 or request.echo:
            loop = asyncio.get_running_loop()
            sampled = [await loop.run_in_executor(None, self.scorer.with_top, request, each) for each in sampled]
        return list(said), list(sampled)

    async def models(self, _: JSON, caller: Caller) -> Payload:
        self.session_of(caller)
        return model_list(self.name, self.config.context)

    async def chat(self, body: JSON, caller: Caller) -> Payload:
        request = read_chat(body)
        said, sampled = await self.replies(caller, request)
        return chat_answer(request, said, sampled, self.name, f"chatcmpl-{next(self.numbers)}")

    async def complete(self, body: JSON, caller: Caller) -> Payload:
        request = read_completion(body)
        self.session_of(caller)
        asked = [replace(request, prompts=(self.scorer.encode(prompt),)) for prompt in request.prompts]
        found = await asyncio.gather(*[self.complete_one(caller, one) for one in asked])
        sampled = [each for replies in found for each in replies]
        texts = [self.scorer.text(request, each) for each in sampled]
        number = f"cmpl-{next(self.numbers)}"
        return completion_answer(request, texts, sampled, self.scorer.text_of, self.name, number)

    async def complete_one(self, caller: Caller, request: ChatRequest) -> list[Sampled]:
        """Returns the completions of one prompt."""
        if request.max_tokens != 0:
            return (await self.replies(caller, request))[1]
        reply = Sampled(None, prompt_ids=request.prompts[0])  # nothing to sample
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(None, self.scorer.with_top, request, reply)] * request.n

    async def generate(self, body: JSON, caller: Caller) -> Payload:
        request = read_generate(body)
        _, sampled = await self.replies(caller, request)
        return generate_answer(request, sampled, f"gen-{next(self.numbers)}")


class Served(AgentConversations):
    """What the rows of the cache hold, for the thread that samples."""

    def __init__(self, tokenizer: Tokenizer, host: Endpoint, thinking: bool | None, seed: int):
        self.tokenizer, self.host = tokenizer, host
        self.num_rows, self.num_samples = len(host.rows), 1
        self.env = Env()
        self.env.dialect = next(name for name, dialect in DIALECTS.items() if dialect == host.dialect)
        self.blank = Problem([], None, thinking=thinking)
        self.problems, self.episodes = [self.blank] * self.num_rows, [Record(0)] * self.num_rows
        self.asked, self.sampled, self.unasked, self.parents = {}, {}, set(), {}
        self.tokens_per_turn, self.wait = 0, Wait("")
        self.keys, self.numbers, self.longest_prompt = make_key(seed), count(), host.config.context - 1

    def start(self, rows: Int[np.ndarray, "B"], num_forks: int) -> Int[np.ndarray, "_"]:
        return np.zeros(0, int)

    def opening(self, row: int, asked: Asked) -> Observation:
        """Returns the prompt of a conversation, or of a completion, which replaces that of the row."""
        self.problems[row], self.episodes[row] = self.blank, Record(0)
        if not asked.request.prompts:
            return super().opening(row, asked)
        (prompt,) = asked.request.prompts
        if len(prompt) > self.longest_prompt:
            raise UserError(FULL)
        return Observation(prompt, begins=True)

    def overflow(self, row: int) -> Observation:
        """Raises UserError: the row stays, and may go on with another request."""
        raise UserError(FULL)

    def key_of(self, row: int, key: UInt32[np.ndarray, "2"]) -> UInt32[np.ndarray, "2"]:
        """Returns a key for a conversation: of the request's seed, or one that no other has."""
        seed = self.asked[row].request.seed
        words = np.asarray(jax.random.key_data(self.keys if seed is None else make_key(seed)))
        number = np.array([next(self.numbers) if seed is None else 0])
        return np.concatenate(threefry((words[:1], words[1:]), number))

    def distribution(self, row: int, default: Distribution) -> Distribution:
        """Returns the distribution that a row's next reply is sampled from."""
        asked = self.asked[row].request.sampling
        given = {name: value for name, value in asked._asdict().items() if value is not None}
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])
        return replace(default, **given)


@dataclass(frozen=True)
class Unrecorded(Distribution):
    """A distribution whose candidates are not recorded."""

    def support_size(self, vocab_size: int) -> int:
        return 0

    def draw(self, logits: Array, uniforms: Array) -> tuple[Array, Array, Array]:
        distribution = Distribution(self.temperature, self.top_k, self.top_p, self.min_p)
        token, logprob, ids = distribution.draw(logits, uniforms)
        return token, logprob, ids[:, :0]


class ServedChain(ProgramChain):
    """Rows without end: one that a new conversation takes begins anew. A segment has one distribution."""

    environment: Served
    forks_per_row = 0

    def __init__(self, environment: Served, sampler: Sampler, weights: Weights):
        num_rows = environment.num_rows
        super().__init__(environment, 0, sampler, weights, ChainJob([], np.zeros((num_rows, 2), np.uint32), 0, 0))
        self.waits, self.turns = np.zeros(num_rows, int), count(1)

    def between_segments(self, is_idle: bool) -> None:
        super(ProgramChain, self).between_segments(is_idle)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Gives a row its prompt; what it held is forgotten."""
        shard = self.table.shards[self.table.shard_of_row[row]]
        if self.table.slots[row] >= 0:
            self.table.leave(row)
            shard.waiting.append(row)
        for numbers in (self.num_tokens, self.num_launched, self.num_cached, self.num_lost, self.turn_starts):
            numbers[row] = 0
        self.versions[row] += 1
        self.prompt_numbers.clear()  # prompts are not shared
        super().begin(row, prompt)
        self.table.prompts[row] = self.versions[row] * len(self.keys) + row

    def launch(self) -> LaunchedSegment | None:
        """Launches a segment of the rows with the distribution whose first row has waited longest."""
        drawing = np.flatnonzero(self.is_drawing & (self.table.slots >= 0))
        default = self.sampler.distribution
        wanted = {row: self.environment.distribution(row, default) for row in drawing.tolist()}
        if not wanted:
            return None
        chosen = wanted[min(wanted, key=lambda row: self.waits[row])]
        others = [row for row, distribution in wanted.items() if distribution != chosen]
        self.waits[drawing[~np.isin(drawing, others)]] = next(self.turns)
        self.is_drawing[others] = False
        self.sampler = replace(self.sampler, distribution=Unrecorded(*vars(chosen).values()))
        try:
            return super().launch()
        finally:
            self.is_drawing[others] = True
            self.sampler = replace(self.sampler, distribution=default)


class TokenScorer:
    """Log-probabilities of whole rows with their likeliest candidates, computed apart from sampling."""

    def __init__(self, model: Decoder, params: Policy, tokenizer: Tokenizer, default: Distribution, context: int):
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.default, self.context = default, context

    def encode(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ids of a prompt. Raises: BadRequest for one that is too long, and for ids that are no tokens."""
        ids = prompt if isinstance(prompt, tuple) else (*self.tokenizer.first_ids, *self.tokenizer.encode(prompt))
        if max(ids, default=0) >= self.model.vocab_size or not ids:
            raise BadRequest("the prompt has no tokens, or ids that the model does not have")
        if len(ids) >= self.context:
            raise BadRequest(FULL)
        return ids

    def text_of(self, token: int) -> str:
        return self.tokenizer.hf.convert_ids_to_tokens(token)

    def text(self, request: ChatRequest, sampled: Sampled) -> str:
        """Returns the text of a completion, behind that of its prompt for an `echo`."""
        reply = sampled.reply.text if sampled.reply else ""
        return self.tokenizer.decode(sampled.prompt_ids) + reply if request.echo else reply

    def with_top(self, request: ChatRequest, sampled: Sampled) -> Sampled:
        """Returns a reply with the likeliest candidates of each of its tokens; with `echo`, of the prompt's too."""
        prompt = sampled.prompt_ids
        row = [*prompt, *sampled.ids]
        tokens = np.zeros((1, bucket(len(row))), np.int32)
        tokens[0, : len(row)] = row
        given = {name: value for name, value in request.sampling._asdict().items() if value is not None}
        temperature = float(given.get("temperature", self.default.temperature)) or 1.0
        with LAUNCHING:
            found = score(self.model, MAX_TOP, self.params, tokens, 1.0 if request.echo else temperature)
        logprobs, values, numbers = jax.tree.map(lambda x: np.asarray(x[0, : len(row)]), found)
        top = [dict(zip(*pair, strict=True)) for pair in zip(numbers.tolist(), values.tolist(), strict=True)]
        if not request.echo:
            return sampled._replace(top=tuple(top[len(prompt) :]))
        return sampled._replace(logprobs=tuple(logprobs.tolist()), top=tuple(top))


@partial(jax.jit, static_argnums=(0, 1))
def score(
    model: Decoder, num_top: int, params: Policy, tokens: Int[Array, "1 T"], temperature: float
) -> tuple[Float[Array, "1 T"], Float[Array, "1 T K"], Int[Array, "1 T K"]]:
    """Returns the log-probability of each token given those before it, and the likeliest tokens; 0 in column 0."""
    hidden = decoder.forward(model, params, tokens)[:, :-1]
    targets, width = tokens[:, 1:], -(-hidden.shape[1] // SCORED) * SCORED
    hidden = jnp.pad(hidden, ((0, 0), (0, width - hidden.shape[1]), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, width - targets.shape[1])))

    def part(columns: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        logits = decoder.head(model, params, columns[0]) / temperature
        logprobs = jax.nn.log_softmax(logits)
        values, ids = jax.lax.top_k(logprobs, min(num_top, model.vocab_size))
        return jnp.take_along_axis(logprobs, columns[1][..., None], axis=-1)[..., 0], values, ids

    parts = hidden.reshape(-1, SCORED, hidden.shape[-1]), targets.reshape(-1, SCORED)
    found = jax.lax.map(part, parts)
    found = jax.tree.map(lambda x: x.reshape(1, width, *x.shape[2:])[:, : tokens.shape[1] - 1], found)
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2))), found)


def main(config: ServeCommand) -> None:
    """Loads the model, and serves it until Ctrl-C."""
    layout, serve = make_layout(config.devices, config.model.ckpt_dir), config.serve
    model, params, tokenizer = load_last(config.model.ckpt_dir, config, layout)
    context = min(serve.context, model.num_positions)
    serve = replace(serve, context=context)
    sampling = replace(config.sampling, prompt_length=context - 1)
    sampler = replace(make_sampler(sampling, model, tokenizer, layout, 1), max_new_tokens=context)
    sampler = with_pages(sampler, config.sampling.page_size, has_turns=True)
    rollout, room = sampling_room(model, layout, params, bucket(context))
    sampler = sampler.on(rollout)
    paging = pages_that_fit(room, model, rollout, sampler.paging, context, serve.rows)
    sampler = replace(sampler, paging=paging)
    num_rows = min(serve.rows, paging.num_slots)
    dialect = serve.dialect or ("qwen" if "<tool_call>" in tokenizer.template else "json")
    scorer = TokenScorer(model, params, tokenizer, sampler.distribution, context)
    name = Path(config.model.ckpt_dir).name
    ((thinking, _),) = prompt_styles([tokenizer], config.model.thinking)
    with (endpoint := Endpoint(serve, name, num_rows, dialect, scorer)).server:
        served = Served(tokenizer, endpoint, thinking, config.model.seed)
        chain = ServedChain(served, sampler, sampler.load_weights(params))
        print(f"{name}: http://{serve.host}:{endpoint.server.port}/v1, {num_rows} conversations of up to "
              f"{context:,} tokens, tool calls as {dialect} (Ctrl-C ends)", flush=True)  # fmt: skip
        try:
            chain.run(Event())
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(ServeCommand, sys.argv[1:], __doc__, aliases={"model_dir": "ckpt_dir"}))
