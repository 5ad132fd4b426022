"""Programs of a teacher, to compile them before step 1: see core/extensions/programs.py."""

from dataclasses import replace

import numpy as np

from core.extensions.programs import outputs_program, zero_batch
from core.extensions.teacher import StateLearner, TaughtLearner, hidden_states, move_average
from models.names import TEACHER
from models.state import TrainState
from utils.devices.compilation import Programs


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
