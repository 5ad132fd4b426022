"""The teacher of a run with --teacher: its model, its prompts, and its states or log-probabilities of a batch.

The teacher's body runs once for each batch. Its states [B, T, D] travel as batch.extras[TEACHER] to the update. The
update makes the logits of both models in chunks of the head: see models/logits.py.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from core.config import Config
from core.extensions.programs import outputs_program, zero_batch
from core.learner import Learner, Update
from core.records import TEACHER_COEFFICIENTS, Batch, Episodes
from core.rollout import RolloutWorker, encode_prompt
from core.terms.distill import TEACHER_LOGPROBS, ComparedDistribution
from envs.base import Problem
from models.architecture import Decoder
from models.checkpoint import default_dtype, load_model, open_model, resolve_model_dir
from models.decoder import head_name, target_hidden
from models.memory import USABLE, gigabytes, runs_on
from models.names import CRITIC, EMBED, TEACHER, Adapters, Array, Extras, Params, Policy
from models.oracle import check_prompt
from models.packing import Packing
from models.state import TrainState
from models.tokenizer import Message, Tokenizer
from utils.batching import bucket
from utils.devices.compilation import Programs
from utils.devices.sharding import Layout, bytes_on_device
from utils.settings.errors import UserError, counted
from utils.settings.groups import BETAS, SAMPLED, SELF, SIBLING

MOST_TRUNCATED = 0.3  # share of completions; a step above it is warned of: see utils/metrics/health.py
SUCCESS = 1.0  # least reward of a sibling that is shown. Source: SDPO, arXiv 2601.20802
SHOWN = "A correct answer to the question that follows:\n\n"  # and a sibling's completion


class TokenStates(NamedTuple):
    """Inputs of the head: for each token the state that it was sampled from, in the token's column."""

    states: Float[Array, "B T D"]


@dataclass(frozen=True)
class StateLearner(Learner):
    """A learner that returns the state of each token, and computes no log-probabilities."""

    def microbatch_outputs(self, params: Policy, batch: Batch, packing: Packing) -> TokenStates:
        """Returns the states of the tokens of a micro-batch, on the devices."""
        return TokenStates(hidden_states(self.model, params, batch.tokens, packing))


@partial(jax.jit, static_argnums=0)
def hidden_states(
    model: Decoder, params: Policy, tokens: Int[Array, "B T"], packing: Packing
) -> Float[Array, "B T D"]:
    """Returns the head's input for each target token."""
    return target_hidden(model, params, tokens, packing)


@dataclass(frozen=True)
class Prefix:
    """A system message before the prompt that only the teacher reads: a text, or the reply of a row's sibling."""

    tokenizer: Tokenizer
    text: str = ""  # SIBLING: the reply of each row's sibling
    longest: int = 0  # tokens that it may add to a prompt

    def prompt(self, problem: Problem, text: str) -> list[int]:
        """Returns the ids of a problem's prompt with this system message before it, rendered as one conversation."""
        return encode_prompt(self.tokenizer, replace(problem, messages=[system(text), *problem.messages]))

    def of_rows(self, batch: Batch, episodes: Episodes | None) -> list[list[int]]:
        """Returns the teacher's prompt of each row of these episodes; empty if it reads the policy's prompt.

        So do rows after the first of a rollout, whose conversations begin with something else than the problem.
        """
        shown: list[list[int]] = [[]] * len(batch)
        if not self.text:
            return shown
        rollouts, texts = batch.rollout[batch.first_rows], [self.text] * len(batch.first_rows)
        if self.text == SIBLING:
            siblings = successful_siblings(batch.rewards[batch.first_rows], batch.group_size)
            texts = [SHOWN + episodes.texts[rollouts[i]] if i >= 0 else "" for i in siblings]
        prompts: dict[tuple[int, str], list[int]] = {}  # rollouts of a group are of one problem
        for row, rollout, text in zip(batch.first_rows, rollouts, texts, strict=True):
            problem = episodes.problems[rollout]
            key = id(problem), text
            if key not in prompts:
                prompts[key] = self.prompt(problem, text) if text else []
            shown[row] = prompts[key]
        return shown


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def successful_siblings(rewards: Float[np.ndarray, "E"], group_size: int) -> Int[np.ndarray, "E"]:
    """Returns for each rollout the next other one of its group, in turn, that succeeded; -1: none did."""
    rollouts = np.arange(len(rewards)).reshape(-1, group_size)
    found = np.full(rollouts.shape, -1)
    for distance in reversed(range(1, group_size)):
        others = np.roll(rollouts, -distance, axis=1)
        found = np.where(rewards[others] >= SUCCESS, others, found)
    return found.ravel()


def with_prompts(prompts: Sequence[Sequence[int]], batch: Batch) -> tuple[Batch, Int[np.ndarray, "B T"]]:
    """Returns the rows with these prompts, and the new column of each old token; empty: a row keeps its prompt.

    The rest of a row does not change. Tokens of prompts are no targets.
    """
    pairs = zip(prompts, batch.prompt_lengths.tolist(), strict=True)
    shifts = np.array([len(prompt) - length if prompt else 0 for prompt, length in pairs])
    old = np.arange(batch.tokens.shape[1])
    columns = np.maximum(old + shifts[:, None], 0)
    shape = len(batch), len(old) + max(0, *shifts)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    kept = np.nonzero((old < batch.lengths[:, None]) & (old + shifts[:, None] >= 0))
    tokens[kept[0], columns[kept]] = batch.tokens[kept]
    mask[kept[0], columns[kept]] = batch.mask[kept]
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    shown = Batch(
        tokens=tokens,
        mask=mask,
        sample_logprobs=np.zeros(shape, np.float32),
        rewards=batch.rewards,
        lengths=batch.lengths + shifts,
        prompt_lengths=batch.prompt_lengths + shifts,
    )
    return shown, columns


@dataclass(frozen=True)
class TaughtLearner(Learner):
    """A learner whose loss or advantages compare the policy with a teacher."""

    config: Config
    teacher: Learner | None = None  # of the teacher's model: returns log-probabilities or states
    policy_of_teacher: Policy | None = None  # None: --teacher self
    prefix: Prefix | None = None

    @property
    def distribution(self) -> ComparedDistribution:
        """Returns the distribution that is sampled, compared with the teacher's."""
        beta = BETAS.get(self.config.distill.distill, 1.0)  # sampled: of no effect, since there are no logits
        return ComparedDistribution(**vars(self.config.sampling.distribution), beta=beta)

    def add_logprobs(
        self, state: TrainState, batch: Batch, episodes: Episodes | None = None
    ) -> tuple[TrainState, Batch]:
        """Adds the results of `Learner.add_logprobs`, moves the average of policies, and adds the teacher's results."""
        state, batch = super().add_logprobs(state, batch)
        if TEACHER in state.extra:
            kept = state.extra[TEACHER]
            params = {name: state.params[name] for name in kept}
            kept = move_average(kept, params, np.float32(self.config.distill.teacher_decay))
            state = replace(state, extra=state.extra | {TEACHER: kept})
        if len(batch):
            with self.out_of_memory():
                batch = replace(batch, extras=batch.extras | self.ask(state, batch, episodes))
        if self.config.objective.advantage == "none":
            batch = replace(batch, rewards=np.nan_to_num(batch.rewards))  # one that failed drops no row
        return state, batch

    def teaching_policy(self, state: TrainState) -> Policy:
        """Returns the policy of the teacher: of --teacher self the current one, or an average."""
        if self.policy_of_teacher is not None:
            return self.policy_of_teacher
        return self.policy(state.extra[TEACHER] if self.config.distill.teacher_decay else state.params)

    def with_head(self, state: TrainState) -> Self:
        """Returns a learner whose updates read the teacher's head: that which the state keeps, if it keeps one."""
        if TEACHER not in state.extra or self.base or self.config.distill.distill == SAMPLED:
            return self
        return replace(self, beside={TEACHER: state.extra[TEACHER][head_name(self.model)]})

    def ask(self, state: TrainState, batch: Batch, episodes: Episodes | None) -> Extras:
        """Returns the teacher's results for a batch, and the coefficients of its rows.

        These are 0 for rows without a prompt to show, and if prompt and completion are longer than the memory plan.
        """
        options = self.config.distill
        most = self.teacher.row_length - (batch.lengths - batch.prompt_lengths)
        prompts = self.prefix.of_rows(batch, episodes)
        prompts = [prompt if len(prompt) <= room else [] for prompt, room in zip(prompts, most, strict=True)]
        is_taught = [bool(prompt) or not self.prefix.text for prompt in prompts]
        shown, columns = with_prompts(prompts, batch)
        said = self.teacher.compute_outputs(self.teaching_policy(state), shown)[0]
        if any(prompts):
            said = said[np.arange(len(batch))[:, None], columns]
        coefficients = options.distill_coef * np.float32(is_taught)
        return {TEACHER_COEFFICIENTS: coefficients, TEACHER_LOGPROBS if options.distill == SAMPLED else TEACHER: said}

    def shapes_of_extras(self, batch: Batch) -> Extras:
        """Returns the shapes of the results of `ask` for a batch."""
        rows, model = partial(jax.ShapeDtypeStruct, sharding=self.layout.rows), self.teacher.model
        extras = {TEACHER_COEFFICIENTS: rows((len(batch),), np.float32)}
        if self.config.distill.distill == SAMPLED:
            return extras | {TEACHER_LOGPROBS: rows(batch.tokens.shape, np.float32)}
        return extras | {TEACHER: rows((*batch.tokens.shape, model.hidden_size), model.dtype)}

    def update(self, state: TrainState, minibatch: Batch, fraction_done: float) -> tuple[TrainState, Update]:
        """Makes one optimizer step: see `Learner.update`. Advantages are whitened already, the addition is not."""
        if self.config.distill.distill == SAMPLED:
            old = minibatch.sample_logprobs if minibatch.old_logprobs is None else minibatch.old_logprobs
            gain = minibatch.extras[TEACHER_COEFFICIENTS][:, None] * (minibatch.extras[TEACHER_LOGPROBS] - old)
            minibatch = replace(minibatch, advantages=minibatch.advantages + np.where(minibatch.mask, gain, 0))
            return super().update(state, minibatch, fraction_done)
        learner = self.with_head(state)
        state, update = Learner.update(learner, state, minibatch, fraction_done)
        # The teacher's logits. Its states were computed before, by `add_logprobs`, in times/logprobs.
        update.metrics["speed/flops"] += 2 * learner.beside[TEACHER].size * int(minibatch.mask.sum())
        return state, update

    def metrics(self, updates: Sequence[Update]) -> dict[str, float | list[float]]:
        """Returns the metrics of a step: see `Learner.metrics`."""
        metrics = super().metrics(updates)
        if updates:
            coefficients = np.concatenate([update.minibatch.extras[TEACHER_COEFFICIENTS] for update in updates])
            finished = np.concatenate([update.minibatch.finished for update in updates])
            metrics["distill/rows_not_taught"] = float(np.mean(coefficients == 0))
            if np.mean(~finished) > MOST_TRUNCATED:
                metrics["distill/cut_off"] = float(np.mean(~finished))
        return metrics


@partial(jax.jit, donate_argnums=0)
def move_average(kept: Params | Adapters, params: Params | Adapters, decay: Float[Array, ""]) -> Params | Adapters:
    """Returns decay x kept + (1 - decay) x params."""
    return jax.tree.map(lambda x, new: decay * x + (1 - decay) * new, kept, params)


def attach_teacher(
    config: Config, learner: Learner, state: TrainState, worker: RolloutWorker
) -> tuple[Config, Learner, TrainState]:
    """Returns settings, learner and state with the teacher of --teacher.

    Raises: UserError for a teacher with another vocabulary, or that does not fit, and as `load_model`.
    """
    options = config.distill
    # Groups of equal rewards have advantage 0, and are taught.
    config = replace(config, objective=replace(config.objective, do_group_filter=False))
    model, policy, notes = learner.model, None, []
    if options.teacher != SELF:
        model, policy, notes = load_teacher(config, learner, state, worker)
    elif options.teacher_decay or not (learner.base or options.distill == SAMPLED):
        # All that is trained, for the average. Or the head, which updates change while the states stay.
        names = [name for name in state.params if name != CRITIC] if options.teacher_decay else [head_name(model)]
        kept = {name: jax.tree.map(jnp.copy, state.params[name]) for name in names}
        state = replace(state, extra=state.extra | {TEACHER: kept})
    prefix = make_prefix(options.teacher_prefix, worker.tokenizer, worker)
    num_columns = prefix.longest + learner.row_length
    if num_columns > model.num_positions:
        raise UserError(
            f"--teacher_prefix has up to {prefix.longest} tokens, with prompt and completion {num_columns}, more than "
            f"the {model.num_positions} of the teacher's context: shorten the prefix, or lower --num_generation_tokens"
        )
    beside = {}
    if options.distill != SAMPLED:
        # Twice: in micro-batches at first, then in minibatches.
        num_bytes = 2 * config.batch_size * bucket(num_columns) * model.hidden_size * jnp.dtype(model.dtype).itemsize
        check_host_room(f"--teacher {options.teacher}: its states of a batch", num_bytes, learner.layout)
        if weights := policy or learner.base:
            beside[TEACHER] = whole_head(weights[head_name(model)], learner)
    copies = [second_layout(model, head) for head in beside.values()]
    learner = learner.planned(state, (beside, policy, copies))
    teacher = (Learner if options.distill == SAMPLED else StateLearner)(**vars(learner) | {"config": config})
    teacher = replace(teacher, model=model, num_generation_tokens=teacher.num_generation_tokens + prefix.longest)
    own = {"config": config, "beside": beside, "notes": (*learner.notes, *notes, describe(config, model, prefix))}
    own |= {"teacher": teacher, "policy_of_teacher": policy, "prefix": prefix}
    return config, TaughtLearner(**vars(learner) | own), state


def copied_head(head: Array | jax.ShapeDtypeStruct, num_ids: int, layout: Layout) -> jax.ShapeDtypeStruct | None:
    """Returns the shape of the copy of a teacher's head that updates read; None: they read the head itself.

    The copy has the ids of the policy, and is sharded as for sampling: along tp only.
    """
    size = num_ids, head.shape[1]
    sharding = layout.sharding(size, ("vocab", "embed"), rollout=True)
    if head.shape == size and head.sharding.is_equivalent_to(sharding, head.ndim):
        return None
    return jax.ShapeDtypeStruct(size, head.dtype, sharding=sharding)


def whole_head(head: Array, learner: Learner) -> Array:
    """Returns the teacher's head as updates read it: see `copied_head`."""
    if copied := copied_head(head, learner.model.vocab_size, learner.layout):
        return jax.jit(lambda x: x[: copied.shape[0]], out_shardings=copied.sharding)(head)
    return head


def without_padding(model: Decoder, policy: Policy, num_ids: int, layout: Layout) -> tuple[Decoder, Policy]:
    """Returns the teacher over the policy's ids: ids that the policy lacks are padding, and get no probability."""
    if model.vocab_size == num_ids:
        return model, policy
    rows = {}
    for name in {EMBED, head_name(model)}:
        sharding = layout.sharding((num_ids, policy[name].shape[1]), ("vocab", "embed"))
        rows[name] = jax.jit(lambda x: x[:num_ids], out_shardings=sharding)(policy[name])
    return replace(model, vocab_size=num_ids), policy | rows


def load_teacher(
    config: Config, learner: Learner, state: TrainState, worker: RolloutWorker
) -> tuple[Decoder, Policy, list[str]]:
    """Loads the teacher's model, in the dtype of matmuls; returns it over the policy's ids, with notes.

    Raises: UserError as `load_model`, for one that does not fit into the free memory, and as `compare_with_policy`.
    """
    name, layout = resolve_model_dir(config.distill.teacher), learner.layout
    arguments = config.compute.arguments | {"param_dtype": config.compute.dtype or default_dtype()}
    source = open_model(name, layout, **arguments)
    check_room(f"--teacher {name}", source.model, layout, (state, learner.reference or learner.base))
    model, policy, tokenizer = load_model(name, layout, **arguments)
    notes = compare_with_policy(config.distill.teacher, tokenizer, model.vocab_size, worker)
    return *without_padding(model, policy, learner.model.vocab_size, layout), notes


def compare_with_policy(name: str, teacher: Tokenizer, num_ids: int, worker: RolloutWorker) -> list[str]:
    """Returns a note if prompts or stop tokens differ. Raises: UserError if ids stand for other tokens, or lack."""
    own, num_own = worker.tokenizer, worker.sampler.model.vocab_size
    if different := sorted(teacher.hf.get_vocab().items() ^ own.hf.get_vocab().items(), key=lambda item: item[1]):
        token, number = different[0]
        raise UserError(
            f"--teacher {name} has another vocabulary than the policy ({counted(len(different), 'difference')}, as "
            f"{token!r} with id {number}): choose one with the same ids, since distillation compares probabilities of "
            "the same ids"
        )
    if num_ids < num_own:
        raise UserError(
            f"--teacher {name} has vocab_size {num_ids:,}, below the policy's {num_own:,}, so some ids have no "
            "probability: choose a teacher with at least as many ids"
        )
    notes, problem = [], worker.env.problem(0)
    if teacher.special_ids != own.special_ids or teacher.stop_ids != own.stop_ids:
        notes.append(f"the teacher ends a completion by ids {teacher.stop_ids}, the policy by {own.stop_ids}")
    if encode_prompt(teacher, problem) != encode_prompt(own, problem):
        notes.append("the teacher's chat template writes prompts in another way; it reads those of the policy")
    return [f"--teacher {name}: {note}" for note in notes]


def make_prefix(text: str, tokenizer: Tokenizer, worker: RolloutWorker) -> Prefix:
    """Returns the prefix that --teacher_prefix names.

    Raises: UserError if there is no such file, and if the chat template refuses or drops the system message.
    """
    prefix, problem, num_written = Prefix(tokenizer, text), worker.env.problem(0), 0
    if not text:
        return prefix
    if text == SIBLING:
        num_written = worker.max_new_tokens + len(tokenizer.encode(problem.prefix))
        if worker.env.has_turns:
            raise UserError(
                f"--teacher_prefix {SIBLING} shows single replies, and {worker.name} has several turns: give a text or "
                "@FILE"
            )
    elif text.startswith("@"):
        file = Path(os.path.expanduser(text[1:]))
        text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not text:
            raise UserError(f"--teacher_prefix @{file}: there is no such file, or it has no text: name another file")
    said = SHOWN if text == SIBLING else text
    try:
        shown = prefix.prompt(problem, said)
    except UserError as error:
        raise UserError(f"--teacher_prefix is a system message, and {error}") from error
    style = problem.thinking, problem.prefix, problem.plain, problem.tools
    check_prompt(tokenizer, shown, [system(said), *problem.messages], *style, what="the teacher's prompt")
    num_added = len(shown) - len(encode_prompt(tokenizer, problem)) + num_written
    return replace(prefix, text=text, longest=max(0, num_added))


def describe(config: Config, model: Decoder, prefix: Prefix) -> str:
    """Returns in one line the teacher and the loss."""
    options = config.distill
    who = f"{options.teacher}, {model.num_parameters:,} parameters"
    if options.teacher_decay:
        who += f", averaged with decay {options.teacher_decay:g} a step"
    if options.teacher_prefix:
        what = "a successful sibling" if prefix.text == SIBLING else f"{prefix.longest} tokens of its own"
        who += f", which reads {what} before the prompt"
    loss = f"+ {options.distill_coef:g} x {options.distill} divergence of each token's distribution"
    if options.distill == SAMPLED:
        loss = f"A + {options.distill_coef:g} (log q - log p) of each sampled token"
    return f"teacher q: {who}; {loss}; groups of equal rewards stay"


def check_room(what: str, model: Decoder, layout: Layout, held: PyTree) -> None:
    """Raises UserError if the weights of another model do not fit into memory in addition to what is held."""
    num_shards = layout.mesh.shape["fsdp"] * layout.mesh.shape["tp"]
    size = model.num_parameters * jnp.dtype(model.dtype).itemsize // num_shards
    room = int(USABLE * layout.device_memory) - bytes_on_device(held)
    if size > room:
        raise UserError(
            f"{what} needs {gigabytes(size)} GB on each device, and only {gigabytes(max(0, room))} GB are free beside "
            "the policy: use a smaller model, adapters over the policy's base, --lora_rank, or a --mesh that shards "
            "weights"
        )


def check_host_room(what: str, num_bytes: int, layout: Layout) -> None:
    """Raises UserError for arrays that wait for updates and do not fit into the host's memory."""
    room = int(USABLE * layout.host_memory)
    if num_bytes > room:
        raise UserError(
            f"{what} need {gigabytes(num_bytes)} GB of the host's memory, which has {gigabytes(room)} GB: lower "
            "--groups_per_batch, --group_size or --num_generation_tokens, or give --distill sampled, which needs none"
        )


def second_layout(model: Decoder, head: Array) -> jax.ShapeDtypeStruct | None:
    """Returns the shape of the copy in another layout that an update on TPU makes of a teacher's head, or None."""
    return jax.ShapeDtypeStruct(head.shape, head.dtype, sharding=head.sharding) if runs_on(model, "tpu") else None


def teacher_programs(learner: TaughtLearner, state: TrainState) -> Programs:
    """Yields the programs by which a teacher reads a batch, and by which an average of policies moves."""
    policy, teacher = learner.teaching_policy(state), learner.teacher
    for shape in teacher.shapes_without_gradients:
        batch, packing = zero_batch(teacher, shape)
        batch = replace(batch, support=None, routes=None, extras={})
        if isinstance(teacher, StateLearner):
            yield hidden_states, (teacher.model, policy, batch.tokens, packing)
        else:
            yield outputs_program(teacher, policy, batch, packing)
    if kept := state.extra.get(TEACHER):
        yield move_average, (kept, {name: state.params[name] for name in kept}, np.float32(0))
