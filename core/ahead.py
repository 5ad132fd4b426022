"""Rollouts a step ahead: those of the next step are drawn in a thread while this step updates the policy.

Step t draws with the weights that step t - 1 began with, the first one with the initial weights. These weights are part
of the training state, so that a resumed run draws the same rollouts again.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event
from typing import Self

import jax
import jax.numpy as jnp

from core.config import Config
from core.learner import Learner
from core.records import Episodes, Progress
from core.rollout import RolloutWorker
from models.names import Adapters, Params, Weights
from utils.devices.memory import sampling_room
from utils.training.state import AheadState, TrainState

Collected = tuple[Episodes, int]  # and the number of the next task
Collect = Callable[[RolloutWorker, Weights, Config, int, int], Collected]


class Rollouts:
    """The rollouts of each step: collected when they are asked for, or with --ahead 1 since the step before.

    A context manager, whose end ends a thread that still draws with its segment.
    """

    def __init__(self, collect: Collect, worker: RolloutWorker, learner: Learner):
        self.collect, self.worker, self.learner = collect, worker, learner
        self.config = learner.config
        self.cancelled = Event()
        self.pool = ThreadPoolExecutor(1, "rollouts")
        self.drawing: Future[Collected] | None = None
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.cancelled.set()
        if self.drawing and not self.drawing.done():
            self.worker.scorer.close()  # for whose outcomes it may wait
        self.pool.shutdown()

    def take(self, state: TrainState, progress: Progress) -> tuple[Episodes, Progress]:
        """Returns the rollouts of the step behind `progress`, and the progress after it.

        Raises: what went wrong where they were drawn.
        """
        if isinstance(state, AheadState):
            episodes, cursor = self.wait_for_next(state, progress)
        else:
            weights = self.worker.load_weights(self.learner.policy(state.params))  # cast and laid out for decoding
            episodes, cursor = self.collect(self.worker, weights, self.config, progress.step + 1, progress.cursor)
        return episodes, progress.after_step(cursor, len(episodes))

    def wait_for_next(self, state: AheadState, progress: Progress) -> Collected:
        """Returns what the thread draws; before the first step of this process it has not begun."""
        clock = time.perf_counter()
        drawing = self.drawing or self.start(state, progress)
        episodes, cursor = drawing.result()
        self.drawing = None
        self.metrics = {
            "rollout/staleness": int(progress.step > 0),
            "times/rollout": time.perf_counter() - clock,
            "times/score": 0.0,  # a part of what was waited for
            "times/rollout_ahead": sum(episodes.times.values()),
        }
        return episodes, cursor

    def draw_ahead(self, state: TrainState, progress: Progress, is_last: bool) -> TrainState:
        """Starts to draw the rollouts of the step behind `progress`, if there is one, before this step's updates.

        Returns the state with the weights that draw them. The ones before are deleted first: memory holds one copy.
        """
        if not isinstance(state, AheadState):
            return state
        jax.tree.map(lambda x: x.delete(), state.behavior_policy)
        state = replace(state, behavior_policy=copy_policy(self.worker, self.learner, state.params))
        if not is_last:
            self.drawing = self.start(state, progress)
        return state

    def start(self, state: AheadState, progress: Progress) -> Future[Collected]:
        """Starts to draw the rollouts of the step behind `progress` in the thread."""
        weights = state.behavior_policy
        if self.learner.base:
            weights = self.worker.load_weights(self.learner.policy(weights))
        return self.pool.submit(self.run, weights, progress)

    def run(self, weights: Weights, progress: Progress) -> Collected:
        """Draws rollouts; small programs, like those of keys, would wait for updates on the first device."""
        worker = replace(self.worker, sampler=replace(self.worker.sampler, cancelled=self.cancelled))
        device = None if worker.own_base is None else worker.layout.mesh.devices.flat[0]
        with jax.default_device(device):
            return self.collect(worker, weights, self.config, progress.step + 1, progress.cursor)

    def wait(self) -> None:
        """Waits until rollouts that are drawn ahead are there: their devices and memory are then free."""
        wait([self.drawing] if self.drawing else [])


def copy_policy(worker: RolloutWorker, learner: Learner, params: Params | Adapters) -> Weights | Adapters:
    """Returns a copy of what an update is about to replace: as the sampler reads it, or adapters over a base."""
    if learner.base:
        return jax.tree.map(jnp.copy, params)
    return worker.load_weights(params)


def prepare_ahead(
    workers: Mapping[str, RolloutWorker], learner: Learner, state: TrainState
) -> tuple[dict[str, RolloutWorker], AheadState]:
    """Returns workers that take over policies of the learner, and the state with weights for the first rollouts."""
    workers = dict(workers)
    is_apart = workers["env"].layout != learner.layout
    if is_apart:
        own_base = workers["env"].layout.receive(learner.base)
        workers = {role: replace(worker, own_base=own_base) for role, worker in workers.items()}
    worker = workers["env"]
    state = AheadState(**vars(state), behavior_policy=copy_policy(worker, learner, state.params))
    if is_apart:
        room = sampling_room(worker.sampler.model, worker.layout, (worker.own_base, state.behavior_policy))
        workers = {role: worker.with_room(room) for role, worker in workers.items()}
    return workers, state
