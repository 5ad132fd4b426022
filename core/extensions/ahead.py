"""Rollouts a step ahead: a thread samples the next step's rollouts while this step updates the policy.

Step t samples with the weights that step t - 1 began with, the first step with the initial weights. These weights are
part of the training state, so that a resumed run samples the same rollouts again.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event

import jax
import jax.numpy as jnp

from core.config import Config
from core.learner import Learner
from core.records import Episodes, Progress
from core.rollout import RolloutWorker
from models.decoder import cast_params
from models.memory import describe_whole, sampling_room
from models.names import ADAPTERS, Policy, Weights
from models.state import TrainState
from utils.devices.sharding import Layout
from utils.runs.shutdown import Signals

BEHAVIOR = "behavior_policy"  # state.extra[BEHAVIOR]: as the sampler reads it, or adapters over a base
Collected = tuple[Episodes, int]  # rollouts, and the number of the next task


@dataclass(frozen=True)
class AheadWorker(RolloutWorker):
    """A worker that takes over the learner's policies, while no rollouts are sampled: these need devices and memory."""

    own_base: Weights | None = None  # LoRA's base on the rollout devices; None: policies have it
    drawing: list[Future] = field(default_factory=list)  # rollouts, one list for all workers of a run

    def load_weights(self, policy: Policy) -> Weights:
        """Returns the weights that `play` samples from: see `RolloutWorker.load_weights`."""
        wait(self.drawing)
        return super().load_weights(self.take_over(policy))

    def take_over(self, policy: Policy) -> Policy:
        """Returns a policy on the devices of this worker; the base below adapters is there already."""
        if self.own_base is None:
            return policy
        if ADAPTERS in policy:
            return self.own_base | {ADAPTERS: self.layout.receive(policy[ADAPTERS])}
        model = self.sampler.model
        params = {name: policy[name] for name in model.parameter_table()}  # without a critic
        return self.layout.receive(cast_params(model, params))


@dataclass
class AheadRollouts:
    """The rollouts of each step, sampled in a thread since the step before; see `Rollouts` of core/grpo.py.

    Stops the sampling thread after its current segment when `stack` ends. A signal of `signals` ends the run while it
    waits for rollouts, and later only after the step: then the state that is saved has lost its weights.
    """

    config: Config
    worker: AheadWorker
    learner: Learner
    collect: Callable[[RolloutWorker, Weights, Config, Progress], Collected]
    fraction_done: Callable[[Config, RolloutWorker, Progress], float]
    stack: ExitStack
    signals: Signals

    def __post_init__(self):
        self.cancelled = Event()
        self.pool = ThreadPoolExecutor(1, "rollouts")
        self.pool.submit(bool).result()  # starts the thread, which a signal would make the pool lose later
        self.stack.callback(self.close)

    def close(self) -> None:
        self.cancelled.set()
        if not all(drawing.done() for drawing in self.worker.drawing):
            self.worker.scorer.close()  # it may wait for outcomes
        self.pool.shutdown()

    def take(self, state: TrainState, progress: Progress) -> tuple[TrainState, Episodes, Progress]:
        """Returns the state, the rollouts of the step after `progress`, and the progress after that step.

        Also starts to sample the next step's rollouts. The state holds the weights that sample them. The previous copy
        is deleted first, so memory holds one.
        Raises: the error of the thread that sampled.
        """
        clock = time.perf_counter()
        if not self.worker.drawing:  # before the first step of this process
            self.start(state, progress)
        episodes, cursor = self.worker.drawing[0].result()
        self.worker.drawing.clear()
        waited = {
            "rollout/staleness": int(progress.step > 0),
            "times/rollout": time.perf_counter() - clock,
            "times/score": 0.0,  # part of the time waited for rollouts
            "times/rollout_ahead": sum(episodes.times.values()),
        }
        progress = progress.after_step(cursor, len(episodes), episodes.memory)
        self.signals.hold()
        jax.tree.map(lambda x: x.delete(), state.extra[BEHAVIOR])
        state = with_behavior(state, self.worker, self.learner)
        if self.fraction_done(self.config, self.worker, progress) < 1:
            self.start(state, progress)
        return state, replace(episodes, metrics=episodes.metrics | waited), progress

    def start(self, state: TrainState, progress: Progress) -> None:
        """Starts to sample the rollouts of the step after `progress` in the thread."""
        weights = state.extra[BEHAVIOR]
        if self.learner.base:
            weights = self.worker.load_weights(self.learner.policy(weights))
        self.worker.drawing.append(self.pool.submit(self.run, weights, progress))

    def run(self, weights: Weights, progress: Progress) -> Collected:
        """Samples rollouts. Small programs, such as for keys, would wait for updates on the first device."""
        worker = replace(self.worker, sampler=replace(self.worker.sampler, cancelled=self.cancelled))
        device = None if worker.own_base is None else worker.layout.mesh.devices.flat[0]
        with jax.default_device(device):
            return self.collect(worker, weights, self.config, progress)


def with_behavior(state: TrainState, worker: AheadWorker, learner: Learner) -> TrainState:
    """Returns the state with a copy of its policy, which samples the next rollouts after an update has replaced it."""
    params = state.params
    copy = jax.tree.map(jnp.copy, params) if learner.base else worker.load_weights(params)
    return replace(state, extra=state.extra | {BEHAVIOR: copy})


def describe_ahead(config: Config, learner: Learner, layout: Layout) -> list[str]:
    """Returns in a line how rollouts are drawn ahead, on devices of this layout, and how the loss treats that."""
    where = "on the devices that --mesh leaves" if config.devices.mesh else "on the same device"
    old = "the sampler's" if config.trusts_sampler else "recomputed, with the weight w for the difference"
    whole = describe_whole(learner.model, layout) if layout != learner.layout else []
    return [f"rollouts are sampled a step ahead, {where}, with weights that are a step old; p_old is {old}", *whole]


def prepare_ahead(
    workers: Mapping[str, RolloutWorker], learner: Learner, state: TrainState
) -> tuple[dict[str, AheadWorker], TrainState]:
    """Returns workers that take over policies of the learner, and the state with weights for the first rollouts."""
    is_apart = workers["env"].layout != learner.layout
    own_base = workers["env"].layout.receive(learner.base) if is_apart else None
    drawing: list[Future] = []
    ours = {role: AheadWorker(**vars(worker), own_base=own_base, drawing=drawing) for role, worker in workers.items()}
    worker = ours["env"]
    state = with_behavior(state, worker, learner)
    room = learner.sampling_room
    if is_apart:
        held = worker.own_base, state.extra[BEHAVIOR]
        room = sampling_room(worker.sampler.model, worker.layout, held, worker.row_length)
    ours = {role: worker.with_room(room, learner.config.batch_size) for role, worker in ours.items()}
    return ours, state
