"""The run folder: configuration, training state to resume from, models to use elsewhere, rollouts to look into.

config.json  metrics.jsonl  plot.png  report.html  rollouts/step_N.jsonl
state/ (Orbax)  stepN/ and best/ (Hugging Face folders)
"""

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from utils.config import option, to_dict
from utils.logger import Logger
from utils.plots import before_and_after, plot
from utils.report import write_report
from utils.sharding import Layout
from utils.sinks import SinkConfig, open_sinks


@dataclass(frozen=True)
class RunConfig(SinkConfig):
    """Run folder and logging."""

    save_dir: str = option("", "run folder; a run found there is resumed; empty: runs/<environment>-<time>")
    save_interval: int = option(20, "steps between saved models and states; 0: only at the end")
    save_best: bool = option(False, "keep the model with the best held-out score in best/")
    keep: int = option(2, "training states kept")
    save_rollouts: str = option("sample", "rollouts written per step", ["all", "sample", "none"])
    sample_interval: int = option(10, "steps between example completions on the terminal; 0: none")

    def __post_init__(self):
        if self.save_interval < 0 or self.sample_interval < 0 or self.keep < 1:
            raise ValueError("--save_interval and --sample_interval must not be negative, --keep at least 1")


class Run:
    """A run folder; all processes call every method, the main one writes.

    Raises: OSError when the folder cannot be made or written.
    """

    def __init__(self, config: RunConfig, layout: Layout):
        default = f"runs/{config.env_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.directory = Path(config.save_dir or layout.broadcast(default)).expanduser().absolute()
        self.config, self.layout = config, layout
        self.directory.mkdir(parents=True, exist_ok=True)
        if layout.is_main:
            (self.directory / "config.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, create=True)
        self.states = ocp.CheckpointManager(self.directory / "state", options=options)

    def restore(self, state: Any) -> tuple[Any, dict]:
        """The newest saved training state, laid out as `state`, and the progress saved with it; ({} for a new run)."""
        step = self.states.latest_step()
        if step is None:
            return state, {}
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        restored = self.states.restore(step, args=args)
        return restored.state, restored.progress

    def save(self, step: int, state: Any, progress: dict) -> None:
        """Writes the training state in the background; a half-written one is never found by `restore`."""
        if self.states.latest_step() != step:
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress))
            self.states.save(step, args=args)

    def write_rollouts(self, step: int, rows: list[dict]) -> None:
        """Writes one JSON object per rollout: all of them, or those of the first two groups."""
        if not self.layout.is_main or self.config.save_rollouts == "none":
            return
        if self.config.save_rollouts == "sample":
            rows = [row for row in rows if row["group"] < 2]
        path = self.directory / "rollouts" / f"step_{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row, default=plain) + "\n" for row in rows))

    def write_bad_batch(self, batch: Any) -> None:
        """Writes a batch whose loss or gradient was not finite to bad_batches/, where it can be looked at."""
        if not self.layout.is_main:
            return
        folder = self.directory / "bad_batches"
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir()))}.npz"
        arrays = {name: x for name, x in vars(batch).items() if isinstance(x, np.ndarray)}
        np.savez(path, **arrays)
        print(f"warning: an update was skipped, since its loss or gradient is not finite; its batch: {path}")

    def start_logger(self, resume_step: int) -> Logger:
        """The logger of this run, which drops what an earlier try logged after `resume_step`."""
        settings, is_main = to_dict(self.config), self.layout.is_main
        sinks = open_sinks(self.config, self.directory, settings, resume_step) if is_main else []
        return Logger(self.directory, enabled=is_main, resume_step=resume_step, sinks=sinks)

    def draw(self) -> None:
        """Draws plot.png and report.html anew."""
        if self.layout.is_main:
            plot(self.directory / "metrics.jsonl", self.directory / "plot.png")
            write_report([self.directory], self.directory / "report.html")

    def before_and_after(self) -> str:
        """The first and the last held-out scores, as a table."""
        return before_and_after(self.directory / "metrics.jsonl") if self.layout.is_main else ""

    def profiled(self, wanted: bool) -> contextlib.AbstractContextManager:
        """Traces what happens inside, when --profile asks for it and the step is past compilation."""
        tracing = self.config.profile and wanted
        return jax.profiler.trace(str(self.directory / "profile")) if tracing else contextlib.nullcontext()

    def close(self) -> None:
        """Waits for what is still being written."""
        self.states.wait_until_finished()
        self.states.close()


def plain(value: Any) -> Any:
    """NumPy values as JSON knows them."""
    return np.asarray(value).tolist()


def describe_play(played: list, group_size: int) -> dict[str, float]:
    """Means over everything that was played in a step, whether it is learnt from or not."""
    metrics = {}
    for name in sorted(set().union(*(e.scores for e in played))):
        parts = [e.scores.get(name, np.zeros(len(e.ids))) for e in played]
        metrics[f"env/{name}"] = float(np.concatenate(parts).mean())
    lengths = np.concatenate([e.rollouts.lengths - e.rollouts.prompt_lengths for e in played])
    groups = np.concatenate([e.scores["return"] for e in played]).reshape(-1, group_size)
    for name in played[0].failures:
        metrics[f"env/{name}"] = sum(e.failures[name] for e in played)
    times = {f"times/{name}": sum(e.times[name] for e in played) for name in played[0].times}
    return metrics | times | {
        "env/length": float(lengths.mean()),
        "env/finished": float(np.concatenate([e.rollouts.finished for e in played]).mean()),
        "env/groups_without_signal": float((np.ptp(groups, axis=1) <= 1e-6).mean()),
        "rollout/num_rollouts": len(lengths),
        "rollout/tokens_per_second": float(lengths.sum() / times["times/rollout"]),
    }  # fmt: skip


def rollout_rows(played: list, group_size: int, tokenizer: Any = None, learnt: Any = None) -> list[dict]:
    """What rollouts/step_N.jsonl holds of each rollout.

    With a tokenizer also what report.html colours, for the first two groups only, since it is long: prompt, tokens and
    their log-probabilities; and of rows that are in the batch `learnt`, their advantage and what else it knows of them.
    """
    rows, learnt_rows = [], {} if learnt is None else {identity(learnt, i): i for i in range(len(learnt.lengths))}
    for e in played:
        r = e.rollouts
        for i, text in enumerate(e.texts):
            scores = {name: x[i] for name, x in e.scores.items()}
            completion = {"length": r.lengths[i] - r.prompt_lengths[i], "finished": r.finished[i]}
            row = {"group": len(rows) // group_size, "task": e.ids[i], "text": text} | scores | completion
            if tokenizer and row["group"] < 2:
                row |= token_fields(r, i, tokenizer, learnt, learnt_rows.get(identity(r, i)))
            rows.append(row)
    return rows


def identity(rollouts: Any, i: int) -> bytes:
    """The tokens of a row, by which it is found again in a batch whose rows were chosen and cut to another width."""
    return np.asarray(rollouts.tokens[i, : rollouts.lengths[i]], np.int32).tobytes()


def token_fields(rollouts: Any, i: int, tokenizer: Any, learnt: Any, row: int | None) -> dict[str, Any]:
    """The fields of rollout `i` that speak of single tokens; it is `row` of the batch `learnt` (None: not in it)."""
    start, end = int(rollouts.prompt_lengths[i]), int(rollouts.lengths[i])
    ids, columns = rollouts.tokens[i].tolist(), slice(start, end)
    fields = {"prompt": tokenizer.hf.decode(ids[:start]), "tokens": token_texts(tokenizer, ids[columns])}
    lists = {"logprobs": rollouts.logprobs[i]}
    if row is not None:
        known = {"advantage": learnt.advantages, "old_logprobs": learnt.old_logprobs}
        lists |= {name: x[row] for name, x in known.items() if x is not None}
    lists = {name: np.round(np.asarray(x[columns], float), 4) + 0.0 for name, x in lists.items()}  # + 0.0: no "-0.0"
    if "advantage" in lists and not np.ptp(lists["advantage"]):
        lists["advantage"] = lists["advantage"][0]  # one for the completion
    return fields | lists


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token; a character that several tokens spell stands with the last of them."""
    texts, pending = [], []
    for place, token in enumerate(ids, 1):
        pending.append(token)
        text = tokenizer.hf.decode(pending)
        is_whole = not text.endswith("\ufffd") or len(pending) == 8 or place == len(ids)  # 8: no character, wrong bytes
        texts.append(text if is_whole else "")
        pending = [] if is_whole else pending
    return texts


def example(episodes, tokenizer) -> tuple[str, str, float]:
    """Prompt, completion and return of the first rollout."""
    r = episodes.rollouts
    return tokenizer.decode(r.tokens[0, : r.prompt_lengths[0]]), episodes.texts[0], episodes.scores["return"][0]


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens now."""
    return interval > 0 and step % interval == 0
