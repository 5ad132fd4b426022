"""Trains many policies over one base in one process: adapters, an objective and a run folder for each member.

    python extras/population.py --population "seed=0,1,2;config=configs/grpo.py,configs/cispo.py" \\
        --config configs/demo.py --lora_rank 4 --lr 3e-3 --save_dir runs/population

Each combination of the values is a member; all other options, as of core/grpo.py, are for all. A member is a run of
core/grpo.py, in a thread and a folder of its own; extras/members.py samples completions of all in one batch.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import contextlib
import itertools
import os
import re
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from core.config import Config
from core.extensions.notes import training_notes
from core.grpo import Rollouts, make_workers, train
from core.learner import Learner, make_learner
from core.records import Progress
from core.rollout import RolloutWorker
from core.run.folder import make_default_folder, settings_of_model
from core.run.report import describe_steps
from core.run.run import Run
from envs.settings import resolve_environments
from extras.members import MemberSampler, SharedSampler, labeled_output, settings_of
from models.checkpoint import load_policy
from models.state import TrainState
from models.tokenizer import Tokenizer
from utils.devices.sharding import Layout
from utils.devices.startup import ending_together, make_layout
from utils.evaluation.estimates import mean_over_runs
from utils.evaluation.tables import FIRST, align, scores_of
from utils.metrics.curves import Curves, read_metrics
from utils.metrics.logger import lossy_output
from utils.metrics.sinks import asks_for_wandb
from utils.reporting.page import write_report
from utils.runs.shutdown import Signals
from utils.settings.arguments import read_arguments
from utils.settings.config import options_of, parse, to_dict, with_options
from utils.settings.errors import UserError, counted, refuse, user_errors
from utils.settings.lmpo import LMPO
from utils.settings.options import option
from utils.settings.presets import demo_of_tiny

SHARED_GROUPS = ("lora", "compute", "devices")  # groups of options in which members agree, beside SHARED
SHARED = ("model_dir", "inference_batch_per_device")
POLL = 0.1  # seconds between two looks at signals
HELD_OUT = "test_env/"  # before the names of held-out scores in a log
MemberOptions = dict[str, str]  # the values of a member, by the name of the option


@dataclass(frozen=True)
class PopulationConfig(Config):
    """Population."""

    population: str = option(
        "",
        "Options in which members differ, as name=value,value, separated by semicolons; each combination of values is "
        "a member. Presets can differ too: config=configs/grpo.py,configs/cispo.py",
        essential=True,
    )


class MemberRun(Run):
    """A run whose updates take turns with the other members' runs."""

    # Updates of several members at once need the memory of several, and are no faster: 8 of the demo take 9 seconds of
    # a CPU in any case, two at once 2.1 GB instead of 1.4.
    turn = threading.Lock()
    failed = ""  # name of the member whose failure ends this run

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step without the wait for the member's turn: see `Run.phase`."""
        with contextlib.nullcontext() if name == "rollout" else self.turn, super().phase(name):
            yield

    def write_report(self, is_ended: bool = False) -> None:
        """Writes config.json and the report: see `Run.write_report`."""
        with self.turn:
            super().write_report(is_ended)

    def save_newest(self) -> tuple[TrainState, Progress] | None:
        """Writes the newest state: see `Run.save_newest`. Orbax mixes up the files of two saves at once."""
        with self.turn:
            saved = super().save_newest()
            self.states.checkpoints.wait()
        return saved

    @property
    def stopped_by(self) -> str:
        return f"the failure of {self.failed}" if self.failed else super().stopped_by


@dataclass
class Member:
    """A run of the population."""

    name: str
    config: Config
    run: MemberRun
    workers: Mapping[str, RolloutWorker]
    learner: Learner
    tokenizer: Tokenizer
    state: TrainState
    progress: Progress
    status: int = 0  # exit status

    def train(self, shared: SharedSampler) -> None:
        """Trains as core/grpo.py does; runs in a thread, whose name begins each line that it prints."""
        run, learner, workers = self.run, self.learner, self.workers
        try:
            with user_errors(), run.start(learner.model, self.tokenizer, workers.values()):
                worker = workers["env"]
                notes = training_notes(self.config, learner, self.state.params, worker)
                steps = describe_steps(run.folder, worker.max_new_tokens)
                run.folder.print(*steps, *run.notes, *worker.notes, *notes)
                rollouts = Rollouts(self.config, workers["env"], learner, bins=None)
                train(self.config, run, workers, rollouts, learner, self.state, self.progress)
        except SystemExit as end:
            self.status = end.code
        except BaseException:  # noqa: BLE001 (the others are ended, and the process with them)
            traceback.print_exc()
            self.status = 1
        finally:
            shared.leave(self.name)


def main(argv: Sequence[str]) -> None:
    config = parse(PopulationConfig, argv, __doc__, spellings=LMPO, implied=demo_of_tiny)
    values = member_values(config.population)
    read = partial(parse, Config, spellings=LMPO, implied=partial(settings_of_model, is_announced=False))
    configs = {name: read(member_arguments(argv, own)) for name, own in values.items()}
    check_members(configs)
    os.environ["WANDB_MODE"] = "disabled"  # in any case: it logs one run of a process
    first = next(iter(configs.values()))
    layout = make_layout(first.devices, first.model_dir)
    if layout.mesh.size > 1:
        raise UserError(
            f"a population trains on one device, and there are {layout.mesh.size}: hide the others, for example by "
            "CUDA_VISIBLE_DEVICES=0"
        )
    folder = config.run.save_dir or make_default_folder("population", layout)
    configs = {name: with_options(own, save_dir=f"{folder}/{name}") for name, own in configs.items()}
    shared = SharedSampler(list(configs))
    with lossy_output(), labeled_output(configs):
        members = make_members(configs, layout, shared)
        train_members(members, shared)
    write_comparison(members, values)


def member_values(text: str) -> dict[str, MemberOptions]:
    """Returns the values of each member of --population, by its name. Raises: UserError if it cannot be read."""
    axes: dict[str, list[str]] = {}
    for part in filter(None, text.split(";")):
        name, _, values = part.strip().partition("=")
        if not name or not values or name in axes or name in ("population", "save_dir"):
            raise UserError(
                f"--population {text!r}: {part!r} is not an option with values, or is named twice: write "
                "name=value,value, as in seed=0,1,2;config=configs/grpo.py,configs/cispo.py (save_dir cannot differ: "
                "members have folders in --save_dir)"
            )
        axes[name] = values.split(",")
    if not axes:
        raise UserError("--population names no members: give values, as in seed=0,1,2, or run core/grpo.py")
    members = {}
    for values in itertools.product(*axes.values()):
        own = dict(zip(axes, values, strict=True))
        name = "_".join(f"{option}={short_value(value)}" for option, value in own.items())
        if name in members:
            raise UserError(f"--population {text!r} has two members whose folder is {name}: leave one out")
        members[name] = own
    return members


def short_value(value: str) -> str:
    """Returns a value as part of a folder's name: of a path its last part, without the ending of a preset."""
    name = re.sub(r"\.(py|yaml|yml|json)$", "", value.rstrip("/").rpartition("/")[2])
    return re.sub(r"[^\w.+-]", "-", name)


def member_arguments(argv: Sequence[str], own: MemberOptions) -> list[str]:
    """Returns the command line of a member: that of all without --population, and its own values."""
    types = {name: known.type for name, known in options_of(PopulationConfig).items()}
    types |= {name: str for name in ("config", *LMPO)}
    arguments = [(name, value) for name, value in read_arguments(argv, types, {}) if name != "population"]
    return [f"--{name}={value}" for name, value in (*arguments, *own.items())]


def check_members(configs: Mapping[str, Config]) -> None:
    """Raises UserError for options that members cannot share, or that need a run alone."""
    first_name, first = next(iter(configs.items()))
    for name, config in configs.items():
        mine, theirs = to_dict(config), to_dict(first)
        for known in options_of(Config).values():
            is_shared = known.group in SHARED_GROUPS or known.name in SHARED
            if is_shared and mine[known.name] != theirs[known.name]:
                raise UserError(
                    f"--{known.name} is {theirs[known.name]!r} in {first_name} and {mine[known.name]!r} in {name}, but "
                    "members share the base and the sampler: give it one value"
                )
        single = {
            "--ahead": config.ahead, "--task_sampling bins": config.update.task_sampling == "bins",
            "--teacher": config.distill.teacher, "--profile": config.run.profile,
            "options of wandb": asks_for_wandb(config.run),
        }  # fmt: skip
        alone = [name for name, is_on in single.items() if is_on]
        refuse([
            (not config.lora.lora_rank, "--population trains adapters over one base: give --lora_rank"),
            (config.lora.lora_merge == "always",
             "--lora_merge always makes a copy with the adapters of one member only: leave it out"),
            (alone, f"{', '.join(alone)}: a population has several runs, so leave this out"),
        ])  # fmt: skip


def make_members(configs: Mapping[str, Config], layout: Layout, shared: SharedSampler) -> list[Member]:
    """Returns the members over one base, each resumed from its folder."""
    members: list[Member] = []
    for name, config in configs.items():
        try:
            members.append(make_member(name, config, layout, shared, *members[:1]))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    for role in members[0].workers:
        pagings = [member.workers[role].sampler.paging for member in members]
        least = min(pagings, key=lambda paging: (paging.num_slots, paging.num_pages))
        for member in members:
            worker = member.workers[role]
            paging = replace(worker.sampler.paging, num_slots=least.num_slots, num_pages=least.num_pages)
            member.workers[role] = replace(worker, sampler=replace(worker.sampler, paging=paging))
    return members


def make_member(
    name: str, config: Config, layout: Layout, shared: SharedSampler, first: Member | None = None
) -> Member:
    """Returns a member, over the base of the first one if there is one already."""
    environments = resolve_environments(config.env, config.held_out, config.sampling)
    run = MemberRun(config, layout, environments)
    lora = replace(config.lora, lora_merge="never")
    arguments = config.compute.arguments
    model, base, adapters, tokenizer = load_policy(run.folder.model_dir, lora, config.seed, layout, **arguments)
    base = first.learner.base if first else base  # one copy for all
    if model.num_experts and model.adapts_experts:
        raise UserError("members of a population cannot have adapters of experts: train this model in a run of its own")
    tokenizer = first.tokenizer if first else tokenizer
    # Members score at the same time: together they have a process for each core.
    num_scorers = max(1, (os.cpu_count() or 1) // len(shared.members))
    rewards = replace(config.rewards, num_score_workers=config.rewards.num_score_workers or num_scorers)
    worker_config = replace(config, rewards=rewards)
    workers = make_workers(worker_config, environments, model, tokenizer, layout, run.folder.path)
    for role, worker in workers.items():
        own = settings_of(worker.sampler) | {"member": name, "signals": run.stop.signals, "shared": shared}
        workers[role] = replace(worker, sampler=MemberSampler(**own))
    num_tokens = workers["env"].max_new_tokens
    learner, state = make_learner(config, model, adapters, layout, num_tokens, run.log.write_bad_batch, base)
    workers = {role: worker.with_room(learner.sampling_room, config.batch_size) for role, worker in workers.items()}
    state, progress = run.restore(state)
    return Member(name, config, run, workers, learner, tokenizer, state, progress)


def train_members(members: Sequence[Member], shared: SharedSampler) -> None:
    """Trains all members until they are done. A signal, or a failure of one, ends all, with what they have reached.

    Raises: SystemExit after a signal or a failure.
    """
    threads = []
    failed = None
    with Signals() as signals:
        for member in members:
            thread = threading.Thread(target=member.train, args=(shared,), name=member.name, daemon=True)
            thread.start()
            threads.append(thread)
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(POLL)
            if not signals.received:
                failed = failed or next((member for member in members if member.status), None)
            for member in members if signals.received or failed else ():
                member.run.failed = failed.name if failed else ""
                member.run.stop.signals.received = signals.received or signal.SIGTERM
            shared.stop()
    failed = failed or next((member for member in members if member.status), None)
    if failed:
        raise SystemExit(failed.status)


def write_comparison(members: Sequence[Member], values: Mapping[str, MemberOptions]) -> None:
    """Prints the last held-out scores of all members, and writes population.html."""
    runs = {member.name: read_metrics(member.run.folder.path / "metrics.jsonl") for member in members}
    groups = {}  # groups of members that differ in the seed only
    for name, own in values.items():
        others = "_".join(f"{option}={short_value(value)}" for option, value in own.items() if option != "seed")
        groups.setdefault(others or "all", []).append(name)
    folder = members[0].run.folder.path.parent
    if scores := format_runs(runs, groups):
        print(scores)
    write_report([member.run.folder.path for member in members], folder / "population.html")
    print(f"curves and completions: {folder / 'population.html'}")


def format_runs(runs: Mapping[str, Curves], groups: Mapping[str, Sequence[str]]) -> str:
    """Returns the first and last held-out scores of runs as a table, and their means over the runs of groups.

    `runs`: steps and values of each metric, by name; `groups`: names of runs. Empty if nothing was held out.
    """
    names = [name for name in FIRST if all(HELD_OUT + name in run for run in runs.values())]
    if not names:
        return ""
    titles, table = [f"{name} {when}" for when in ("before", "after") for name in names], {}
    for place in (0, -1):
        rows = {
            run: {name.removeprefix(HELD_OUT): float(values[place]) for name, (_, values) in metrics.items()}
            for run, metrics in runs.items()
        }
        cells = {run: scores_of(row, names) for run, row in rows.items()}
        for group, members in groups.items() if len(runs) > len(groups) else ():
            few = " (too few seeds)" if len(members) == 2 else ""
            means = {name: mean_over_runs(name, np.array([rows[member][name] for member in members])) for name in names}
            title = f"{group}: mean over {counted(len(members), 'seed')}"
            cells[title] = [f"{scores_of(mean, [name])[0]}{few}" for name, mean in means.items()]
        for row, own in cells.items():
            table[row] = [*table.get(row, ()), *own]
    return align([["held-out, 95% intervals", *titles], *([row, *cells] for row, cells in table.items())])


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(sys.argv[1:])
