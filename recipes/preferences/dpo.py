"""Trains a language model on pairs of replies, of which one is preferred (DPO, IPO): between SFT and RL.

    python recipes/preferences/dpo.py --model_dir ~/runs/sft --data pairs.jsonl --save_dir ~/runs/dpo
    python recipes/preferences/dpo.py --model_dir ~/runs/sft --pairs_from ~/runs/gsm8k --loss ipo --save_dir ~/runs/ipo

The columns of --data are prompt, chosen and rejected, as text or lists of messages, or as --columns
prompt=COLUMN,chosen=COLUMN,rejected=COLUMN names them. The loop is that of core/sft.py. A pair is two rows. The loss of
a pair depends on the log-probabilities of both rows, so these are computed first; an update is then one of REINFORCE,
whose advantages are the slopes of the loss.
"""

import gc
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from core.advantages import ObjectiveConfig
from core.learner import Learner
from core.records import Batch, Completions, differs
from core.run.card import DPO
from core.run.folder import settings_of_adapters
from core.run.run import Run
from core.run.stored import read_episodes
from core.sft import Demonstrations, SFTConfig, SftOptimizerConfig, main
from envs.data.files import RawRow
from envs.data.messages import CONVERSATIONS, PROMPTS, REPLY, Messages, as_messages, get_column, read_prompt
from envs.data.rows import LeftOut, Row, first_of
from envs.own.written import DataConfig, WrittenSettings, parse_columns, read_conversation, read_written
from models.checkpoint import find_model, resolve_model_dir
from models.conversations import Conversation
from models.state import TrainState
from models.tokenizer import Tokenizer, load_tokenizer
from utils.devices.startup import ending_together
from utils.evaluation.losses import loss_metrics, row_losses
from utils.settings.config import make_config, parse
from utils.settings.errors import UserError, user_errors
from utils.settings.options import group, option

SIDES = ("chosen", "rejected")
FORM = "prompt=COLUMN,chosen=COLUMN,rejected=COLUMN"
SIGNS = np.array([1.0, -1.0])  # of a chosen and a rejected row
PairLosses = tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N 2"]]  # losses; their slopes by a token's log p


def dpo(ratios: Float[np.ndarray, "N 2"], num_tokens: Float[np.ndarray, "N 2"], beta: float) -> PairLosses:
    """Loss of DPO, of log(p / p_ref) of each reply, a sum over its tokens. Source: arXiv 2305.18290, eq. 7."""
    margins = beta * (ratios[:, 0] - ratios[:, 1])
    losses = np.logaddexp(0, -margins)
    return losses, -beta * np.exp(-margins - losses)[:, None] * SIGNS


def ipo(ratios: Float[np.ndarray, "N 2"], num_tokens: Float[np.ndarray, "N 2"], beta: float) -> PairLosses:
    """Loss of IPO, of the same divided by the number of tokens, as in TRL. Source: arXiv 2310.12036, eq. 17."""
    chosen, rejected = (ratios / num_tokens).T
    distances = chosen - rejected - 1 / (2 * beta)
    return distances**2, 2 * distances[:, None] * SIGNS / num_tokens


LOSSES = {"dpo": dpo, "ipo": ipo}


@dataclass(frozen=True)
class PairConfig(DataConfig):
    """Pairs."""

    noun = "pair"

    pairs_from: str = option(
        "",
        "Run folder whose stored rollouts (--save_rollouts all) are the pairs, instead of --data: the best and the "
        "worst of each group",
        essential=True,
    )

    def __post_init__(self):
        if bool(self.data) == bool(self.pairs_from):
            raise UserError("pairs come from --data or from --pairs_from: give one of the two")
        self.check()

    @property
    def source(self) -> str:
        return self.data or self.pairs_from

    @property
    def named_columns(self) -> dict[str, str]:
        return parse_columns(self.columns, {name: name for name in ("prompt", *SIDES)}, FORM)

    def read(self, row: RawRow) -> Row:
        """Returns a row of data: its prompt, by which it is held out, and the chosen and the rejected conversation.

        Replies of the prompt are not trained. Raises: ValueError for a row that is no pair.
        """
        columns = self.named_columns
        names = [columns.get(name, name) for name in SIDES]
        try:
            sides = [as_messages(get_column(row, name), REPLY) for name in names]
            prompt = columns.get("prompt") or first_of(PROMPTS, row)
            said = read_prompt(get_column(row, prompt)) if prompt else ""
        except KeyError as error:
            found = f"it has no column {error}, only {', '.join(map(repr, row))[:200]}"
            raise ValueError(f"{found}: name the columns by --columns {FORM}") from error
        if all(side and side[0]["role"] != REPLY for side in sides):  # they begin with the prompt
            num_shared = next((i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
            said, sides = sides[0][:num_shared], [side[num_shared:] for side in sides]
        if not said:
            raise ValueError("it has no prompt: write a column prompt, or begin both replies with the same messages")
        if sides[0] == sides[1]:
            raise LeftOut("with equal replies")
        prompt_messages = as_messages(said, "user")
        said = [message | {"weight": 0} if message["role"] == REPLY else message for message in prompt_messages]
        rest = {name: x for name, x in row.items() if name not in (*CONVERSATIONS, *PROMPTS, *names, prompt)}
        pair = [read_conversation(rest | {"prompt": said, "completion": side}) for side in sides]
        return Row(pair[0].prompt, [conversation for side in pair for conversation in side.answer])

    @property
    def encoding(self) -> dict[str, str | int]:
        return super().encoding | {"group_size": 2}


@dataclass(frozen=True)
class DPOOptimizerConfig(SftOptimizerConfig):
    """Optimizer of preferences."""

    lr: float = 1e-6


@dataclass(frozen=True)
class DPOConfig(SFTConfig):
    """Preferences."""

    data: PairConfig = group(PairConfig)
    optimizer: DPOOptimizerConfig = group(DPOOptimizerConfig)
    loss: str = option(
        "dpo",
        "Loss of a pair; dpo: of the sums of log-probabilities over the tokens of each reply; ipo: of their means",
        list(LOSSES),
        essential=True,
    )
    beta: float = option(
        0.1,
        "Strength of the pull to the reference model, which is the policy at the start of the run; a larger one moves "
        "less",
        essential=True,
    )

    group_size = 2
    objective = make_config(  # the KL makes the learner compute old and reference log-probabilities
        ObjectiveConfig, objective="reinforce", advantage="reinforce", entropy_coef=0.0, kl_coef=1.0, kl_in="reward"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.beta <= 0:
            raise UserError(f"--beta {self.beta} must be above 0: raise it")


class Preferences(Demonstrations):
    """What recipes/preferences/dpo.py learns from: pairs.

    Raises: UserError for stored token ids that stand for other tokens here.
    """

    command, example = DPO, "pair"

    @staticmethod
    def read(config: PairConfig) -> tuple[WrittenSettings, list[Messages]]:
        """Returns the pairs to train on, and the held-out ones: see `read_written`."""
        return read_written(config, stored_pairs(config.pairs_from) if config.pairs_from else None)

    def __init__(self, config: DPOConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        stored = config.data.pairs_from
        if stored and load_tokenizer(find_model(resolve_model_dir(stored))).hf.get_vocab() != tokenizer.hf.get_vocab():
            raise UserError(f"--pairs_from {stored} has another vocabulary than --model_dir: name a run of this model")

    def weigh(self, run: Run, learner: Learner, state: TrainState, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Returns the batch with the slopes of the losses as advantages, and the metrics of its pairs."""
        with run.phase("logprobs"):
            batch, losses, metrics = compare(learner, state, batch, self.config.loss, self.config.beta)
        return batch, metrics | {"data/loss": float(losses.mean())}

    def measure(
        self, learner: Learner, state: TrainState, batch: Batch
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Returns metrics of held-out pairs, and the arrays of their losses, of which each counts as one token."""
        _, losses, metrics = compare(learner, state, batch, self.config.loss, self.config.beta)
        columns = -losses[:, None], np.ones((len(losses), 1), bool)
        return {f"test_data/{name}": x for name, x in metrics.items()} | loss_metrics(*columns), row_losses(*columns)


def compare(
    learner: Learner, state: TrainState, batch: Batch, loss: str, beta: float
) -> tuple[Batch, Float[np.ndarray, "N"], dict[str, float]]:
    """Returns the batch with advantages, the loss of each of its N pairs, and metrics by TRL's names.

    The update is a mean over tokens, and the loss one over pairs; the advantages have the factor between the two.
    """
    _, batch = learner.add_logprobs(state, batch)
    ratios = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0).sum(axis=1, dtype=np.float64)
    num_tokens = np.maximum(batch.mask.sum(axis=1), 1)
    losses, slopes = LOSSES[loss](ratios.reshape(-1, 2), num_tokens.reshape(-1, 2), beta)
    advantages = -slopes.reshape(-1, 1) * batch.mask.sum() / len(losses)
    chosen, rejected = beta * ratios.reshape(-1, 2).T
    metrics = {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/accuracies": float((chosen > rejected).mean()),
        "rewards/margins": float((chosen - rejected).mean()),
    }
    return replace(batch, advantages=np.float32(np.where(batch.mask, advantages, 0))), losses, metrics


def stored_pairs(run: str) -> list[Row]:
    """Returns the best and the worst rollout of each group that a run has stored, in the order of its steps.

    Groups of equal returns have none, and rollouts whose grader failed are left out. Token ids and masks are those that
    were sampled. Raises: UserError for a folder without rollouts or without a group whose returns differ.
    """
    files = [*Path(os.path.expanduser(run)).glob("rollouts/step_*.npz")]
    advice = "name a run of core/grpo.py with --save_rollouts all"
    if not files:
        raise UserError(f"--pairs_from {run} has no rollouts/step_N.npz: {advice}")
    tokenizer, rows = load_tokenizer(find_model(resolve_model_dir(run))), []
    for file in sorted(files, key=lambda file: int(file.stem.removeprefix("step_"))):
        episodes = read_episodes(file)
        returns = np.where(episodes.failed, np.nan, episodes.scores["return"])
        for number in np.unique(episodes.positions):
            group = np.flatnonzero((episodes.positions == number) & np.isfinite(returns))
            if differs(returns[group]):
                pair = group[[returns[group].argmax(), returns[group].argmin()]]
                sides = [stored_reply(tokenizer, episodes.completions, row) for row in episodes.first_rows[pair]]
                rows.append(Row(sides[0][:1], sides, f"{file}, group {number}"))
    if not rows:
        raise UserError(f"--pairs_from {run} has no group whose returns differ: {advice}, and more steps")
    return rows


def stored_reply(tokenizer: Tokenizer, completions: Completions, row: int) -> Messages:
    """Returns a stored rollout as a conversation: its text tells which prompt it is of, its token ids are trained."""
    start, end = completions.prompt_lengths[row], completions.lengths[row]
    tokens = completions.tokens[row, :end]
    texts = tokenizer.hf.decode(tokens[:start]), tokenizer.hf.decode(tokens[start:])
    messages = Messages(
        {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
    )
    messages.encoded = Conversation(tokens, completions.mask[row, :end])
    return messages


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(DPOConfig, sys.argv[1:], __doc__, implied=settings_of_adapters), Preferences)
