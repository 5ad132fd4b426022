"""Serves a model to programs that talk to OpenAI's endpoint, or to vLLM's: chats, completions, ids in and ids out.

    python recipes/agents/serve.py --model_dir runs/demo --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Use 3 4 7 to make 14."}]}'

A conversation that goes on is continued in its row of the cache: only what is new is encoded and computed. Requests
beyond the rows wait, first come, first served. The server answers this machine only, unless --host and --api_key are
given.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)
    from recipes.agents.server import check_packages
    from utils.settings.errors import user_errors

    with user_errors():
        check_packages("the endpoint")

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from core.chains.pages import with_pages
from core.chains.turns import form_of
from core.chat.models import ChatModelConfig, load_last, prompt_styles
from core.sampler import ChainJob, SamplingConfig, make_sampler
from envs.base import TURN_DIALECTS, Env, OwnRollouts, Problem
from envs.tools.calls import FORMS
from models import decoder
from models.architecture import Decoder
from models.distribution import MAX_SUPPORT, Distribution
from models.memory import pages_that_fit, sampling_room
from models.names import Array, Policy
from models.tokenizer import GENERATION_CONFIG, Tokenizer
from recipes.agents.protocol import (
    CompletionRequest,
    GenerateRequest,
    Message,
    Request,
    Sampled,
    as_json,
    completion_answer,
    completion_choice,
    completion_chunk,
    generate_answer,
    head,
    settled,
    usage,
)
from recipes.agents.rollouts import AgentConversations, ProgramChain
from recipes.agents.server import JSON, BadRequest, Caller, Denied, Payload, Server
from recipes.agents.sessions import FULL, Asked, Dialogue, Endpoint, Session, sse
from recipes.agents.texts import texts_of, token_bytes
from utils.batching import bucket
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.devices.threads import LAUNCHING
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors
from utils.settings.groups import ComputeConfig
from utils.settings.options import group, option

SCORED = 128  # columns whose logits are computed at once
GREEDY = 1e-5  # a temperature below it is 0, as in vLLM
OF_FOLDER = "; -1: of the model's generation_config.json"


@dataclass(frozen=True)
class ServeConfig:
    """Server."""

    port: int = option(8000, "Port; 0: a free one", essential=True)
    host: str = option("127.0.0.1", "Address; another one than of this machine needs --api_key")
    api_key: str = option("", "Key that callers must have; keys that begin with it are sessions of their own")
    context: int = option(4096, "Most tokens of a conversation", essential=True)
    rows: int = option(32, "Conversations whose cache is kept, at most; further requests wait")
    dialect: str = option("qwen", "Form of tool calls; qwen: as the chat template writes them", TURN_DIALECTS)
    temperature: float = option(-1.0, f"Default temperature of requests{OF_FOLDER}, or 1")
    top_p: float = option(-1.0, f"Default top_p of requests{OF_FOLDER}, or 1")
    top_k: int = option(-1, f"Default top_k of requests; 0: all tokens{OF_FOLDER}, or 0")
    page_size: int = option(-1, "Tokens in a page of the KV cache; -1: chosen for the hardware")

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
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)


@dataclass(frozen=True)
class Unrecorded(Distribution):
    """A distribution whose candidates are not recorded."""

    def support_size(self, vocab_size: int) -> int:
        return 0

    def draw(self, logits: Array, uniforms: Array) -> tuple[Array, Array, Array]:
        distribution = Distribution(self.temperature, self.top_k, self.top_p, self.min_p)
        token, logprob, ids = distribution.draw(logits, uniforms)
        return token, logprob, ids[:, :0]

    def logprobs(self, top: np.ndarray, ids: np.ndarray) -> dict[int, float]:
        """Returns log-probabilities of the likeliest tokens `ids`, given those of the softmax at the temperature."""
        is_cut = self.temperature > 0 and not self.is_whole
        if not is_cut:
            return dict(zip(ids.tolist(), top.tolist(), strict=True))
        top = top[: self.top_k or MAX_SUPPORT]
        probs = np.exp(top) / (np.exp(top).sum() if self.top_k else 1)
        keep = (np.cumsum(probs) - probs < self.top_p) & (probs >= self.min_p * probs[0])
        top = top[keep] - np.log(np.exp(top[keep]).sum())
        return dict(zip(ids[: len(keep)][keep].tolist(), top.tolist(), strict=True))


def default_distribution(config: ServeConfig, tokenizer: Tokenizer, vocab_size: int) -> Unrecorded:
    """Returns the distribution of requests that name none: of the options, of the folder, or the whole one."""
    folder = json.loads(tokenizer.files.get(GENERATION_CONFIG, b"{}"))
    found = {name: folder[name] for name in ("temperature", "top_k", "top_p", "min_p") if folder.get(name) is not None}
    if 0 < found.get("top_k", 0) < vocab_size:
        found["top_k"] = min(found["top_k"], MAX_SUPPORT)  # the first line of the server tells it
    found |= {name: x for name in ("temperature", "top_k", "top_p") if (x := getattr(config, name)) >= 0}
    return distribution_with(Unrecorded(), found, vocab_size)


def distribution_with(default: Unrecorded, given: Mapping[str, float], vocab_size: int) -> Unrecorded:
    """Returns a distribution with these values; a top_k of the vocabulary's size, or more, is all tokens.

    Raises: UserError for values that cannot be sampled.
    """
    given = dict(given)
    if 0 < given.get("temperature", 1) < GREEDY:
        given["temperature"] = 0.0
    if not 0 <= given.get("top_k", 0) < vocab_size:
        given["top_k"] = 0
    return replace(default, **given)


class ModelEndpoint(Endpoint):
    """Answers requests; rows of the cache belong to the conversations that were used last."""

    def __init__(self, config: ServeConfig, name: str, num_rows: int, seed: int, scorer: "TokenScorer"):
        self.config, self.context, self.seed, self.scorer = config, config.context, seed, scorer
        handlers = {
            "GET /v1/models": self.models,
            "POST /v1/chat/completions": self.chat,
            "POST /v1/completions": self.complete,
            "POST /inference/v1/generate": self.generate,
        }
        server = Server(handlers, config.host, config.port, stops_work=True)
        super().__init__(server, name, config.dialect, num_places=num_rows)
        self.rows: OrderedDict[int, tuple[Session, Dialogue] | None] = OrderedDict.fromkeys(range(num_rows))

    def take_row(self, session: Session) -> int:
        """Returns a row that is free, or that of the conversation that was not used for longest."""
        row, owner = next((row, owner) for row, owner in self.rows.items() if owner is None or not owner[1].pending)
        if owner and owner[1] in owner[0].dialogues:
            owner[0].dialogues.remove(owner[1])
        return row

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

    def distribution_of(self, request: Request) -> Unrecorded:
        names = {"temperature", "top_p", "top_k", "min_p"}
        given = request.model_dump(include=names, exclude_none=True)
        try:
            return distribution_with(self.scorer.default, given, self.scorer.model.vocab_size)
        except UserError as error:
            raise BadRequest(str(error).replace("--", ""), next(iter(given))) from error

    async def with_top(self, request: Request, replies: list[tuple[Message, Sampled]]) -> list:
        if request.num_top <= 0 and not request.echo:
            return replies
        loop, distribution = asyncio.get_running_loop(), self.distribution_of(request)
        find = partial(self.scorer.with_top, distribution, request.echo)
        return [(message, await loop.run_in_executor(None, find, sampled)) for message, sampled in replies]

    async def complete(self, body: JSON, caller: Caller) -> Payload:
        self.session_of(caller)
        request = CompletionRequest.read(body)
        prompts = [*map(self.scorer.encode, request.prompts)]
        fields = head(self.name, f"cmpl-{next(self.numbers)}")
        if request.stream:
            return self.stream_completion(request, prompts, caller, fields)
        if request.max_tokens == 0:
            found = [[({}, Sampled(None, prompt_ids=prompt))] * request.n for prompt in prompts]
        else:
            found = await asyncio.gather(*[self.replies(caller, request, prompt) for prompt in prompts])
        replies = await self.with_top(request, sum(map(list, found), []))
        choices = [self.choice(request, sampled) for _, sampled in replies]
        return as_json(completion_answer(request, choices, [sampled for _, sampled in replies], fields))

    def text_of(self, request: CompletionRequest, sampled: Sampled, is_partial: bool = False) -> str:
        """Returns the text of a completion, which begins with its prompt for an `echo`."""
        text = sampled.reply.text if sampled.reply else ""
        for stop in request.stops:
            text = text.partition(stop)[0]
        text = settled(text, request.stops) if is_partial else text
        return self.tokenizer.decode(sampled.prompt_ids) + text if request.echo else text

    def choice(self, request: CompletionRequest, sampled: Sampled) -> dict[str, JSON]:
        """Returns a choice of a completion."""
        text, tokenizer = self.text_of(request, sampled), self.tokenizer
        return completion_choice(request, text, sampled, partial(texts_of, tokenizer), partial(token_bytes, tokenizer))

    async def stream_completion(
        self, request: CompletionRequest, prompts: Sequence[Sequence[int]], caller: Caller, fields: Mapping[str, JSON]
    ) -> AsyncIterator[str]:
        """Yields completions as the events of a stream, those of a prompt after those of the one before."""
        sent, everything = [""] * (request.n * len(prompts)), []

        def event(place: int, text: str, **more: JSON) -> str:
            new, sent[place] = text[len(sent[place]) :], text
            choice = {"finish_reason": None, "logprobs": None} | more | {"index": place, "text": new}
            return sse(completion_chunk(fields, [choice]))

        for number, prompt in enumerate(prompts):
            answers, first = [], number * request.n
            async for index, sampled in self.stream(request, caller, prompt, answers):
                text = self.text_of(request, sampled, is_partial=True)
                if text != sent[first + index]:
                    yield event(first + index, text)
            replies = [sampled for _, sampled in await self.with_top(request, answers)]
            for index, sampled in enumerate(replies):
                yield event(first + index, **self.choice(request, sampled))
            everything += replies
        if request.stream_options.include_usage:
            yield sse(completion_chunk(fields, [], usage(everything, request.n)))
        yield "data: [DONE]\n\n"

    async def generate(self, body: JSON, caller: Caller) -> Payload:
        self.session_of(caller)
        whole = GenerateRequest.read(body)
        request, prompt = whole.sampling_params, self.scorer.encode(whole.token_ids)
        replies = await self.with_top(request, await self.replies(caller, request, prompt))
        sampled = [each for _, each in replies]
        return generate_answer(request, sampled, partial(token_bytes, self.tokenizer), f"gen-{next(self.numbers)}")


class TokenScorer:
    """Log-probabilities of whole rows with their likeliest candidates, computed apart from sampling."""

    def __init__(self, model: Decoder, params: Policy, tokenizer: Tokenizer, default: Unrecorded, context: int):
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.default, self.context = default, context

    def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Returns the ids of a prompt. Raises: BadRequest for one that is too long, and for ids that are no tokens."""
        ids = [*self.tokenizer.first_ids, *self.tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
        if not ids or not 0 <= min(ids) <= max(ids) < self.model.vocab_size:
            raise BadRequest("prompt has no tokens, or ids that the model does not have", "prompt")
        if len(ids) >= self.context:
            raise BadRequest(FULL, "prompt")
        return ids

    def with_top(self, distribution: Unrecorded, is_echo: bool, sampled: Sampled) -> Sampled:
        """Returns a reply with the likeliest candidates of each token, of the distribution that it was sampled from.

        With `echo` the prompt has some too, and all are of the softmax at temperature 1.
        """
        row = [*sampled.prompt_ids, *sampled.ids]
        tokens = np.zeros((1, bucket(len(row))), np.int32)
        tokens[0, : len(row)] = row
        distribution = Unrecorded() if is_echo else distribution
        with LAUNCHING:
            found = score(self.model, MAX_SUPPORT, self.params, tokens, distribution.temperature or 1.0)
        logprobs, values, numbers = jax.tree.map(lambda x: np.asarray(x[0, : len(row)]), found)
        start = 0 if is_echo else len(sampled.prompt_ids)
        top = tuple(map(distribution.logprobs, values[start:], numbers[start:]))
        if is_echo:
            return sampled._replace(logprobs=tuple(logprobs.tolist()), top=top)
        pairs = zip(top, sampled.ids, sampled.logprobs, strict=True)
        return sampled._replace(top=top, logprobs=tuple(known.get(i, logprob) for known, i, logprob in pairs))


@partial(jax.jit, static_argnums=(0, 1))
def score(
    model: Decoder, num_top: int, params: Policy, tokens: Int[Array, "1 T"], temperature: float
) -> tuple[Float[Array, "1 T"], Float[Array, "1 T K"], Int[Array, "1 T K"]]:
    """Returns log-probabilities of tokens given those before them, and of the likeliest tokens, with their ids.

    They are of the softmax at this temperature; column 0 has 0.
    """
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
    layout, serve = make_layout(config.devices, config.model.model_dir), config.serve
    model, params, tokenizer = load_last(config.model.model_dir, config, layout)
    context = min(serve.context, model.num_positions)
    serve = replace(serve, context=context)
    sampler = replace(make_sampler(SamplingConfig(), model, tokenizer, layout, 1), max_new_tokens=context)
    distribution = default_distribution(serve, tokenizer, model.vocab_size)
    sampler = replace(sampler, distribution=distribution, max_prompt_tokens=context - 1)
    sampler = with_pages(sampler, serve.page_size, has_turns=True)
    rollout, room = sampling_room(model, layout, params, bucket(context))
    sampler = sampler.on(rollout)
    paging = pages_that_fit(room, model, rollout, sampler.paging, context, serve.rows)
    sampler = replace(sampler, paging=paging)
    num_rows = min(serve.rows, paging.num_slots)
    scorer = TokenScorer(model, params, tokenizer, distribution, context)
    name = Path(config.model.model_dir).name
    ((thinking, _),) = prompt_styles([tokenizer], config.model.thinking)
    env = Env()
    with (endpoint := ModelEndpoint(serve, name, num_rows, config.model.seed, scorer)).server:
        env.dialect, env.rollouts = serve.dialect, OwnRollouts("", "", endpoint)
        blanks, keys = [Problem([], None, thinking=thinking)] * num_rows, np.zeros((num_rows, 2), np.uint32)
        served = AgentConversations(env, tokenizer, layout, blanks, np.zeros(num_rows, int), keys, stream=None)
        chain = ProgramChain(served, 0, sampler, sampler.load_weights(params), ChainJob([], keys, 0, 0))
        form = form_of(tokenizer, serve.dialect)
        calls = f"calls of tools as {next(key for key, x in FORMS.items() if x is form)}" if form else "no tools"
        sampled = f"temperature {distribution.temperature:g}, top_p {distribution.top_p:g}, top_k {distribution.top_k}"
        print(f"{name}: http://{serve.host}:{endpoint.server.port}/v1, {num_rows} conversations of up to "
              f"{context:,} tokens, {sampled} by default, {calls} (Ctrl-C ends)", flush=True)  # fmt: skip
        try:
            chain.run(Event())
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(ServeCommand, sys.argv[1:], __doc__, aliases={"ckpt_dir": "model_dir"}))
