"""Fingerprints of environments, to check that all processes, and a resumed run, see the same problems and rewards."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from envs.base import Env
from envs.prompts import Encode
from utils.devices.sharding import Layout
from utils.metrics.jsonl import JSON
from utils.settings.errors import UserError, counted

if TYPE_CHECKING:
    from envs.data.messages import Messages

NUM_RENDERED = 16  # prompts whose tokens are compared
NUM_SAMPLED = 64  # problems of a generated environment that are compared; of rows, all are


def fingerprint_env(env: Env) -> str:
    """Returns the number of problems and a digest of their messages and answers."""
    count = min(env.num_tasks, NUM_SAMPLED) if env.is_generated else env.num_tasks
    problems = map(env.problem, np.linspace(0, env.num_tasks - 1, count).astype(int).tolist())
    texts = (json.dumps([x.messages, x.answer], sort_keys=True, default=stable).encode() for x in problems)
    return f"{env.num_tasks:,} problems, digest {digest_of(*texts)}"


def fingerprint_rows(rows: "Sequence[Messages]") -> str:
    """Returns the number of conversations and a digest of their messages and tools."""
    text = json.dumps([[row, row.tools] for row in rows], sort_keys=True, default=stable)
    return f"{counted(len(rows), 'conversation')}, digest {digest_of(text.encode())}"


def fingerprint_code(env: Env) -> dict[str, str]:
    """Returns a digest of each file of the user's code that an environment runs."""
    return {str(file): f"code, digest {digest_of(file.read_bytes())}" for file in env.code}


def fingerprint_prompts(env: Env, encode: Encode) -> str:
    """Returns a digest of the tokens of prompts, which the chat template and the tokenizer make of the messages."""
    numbers = np.linspace(0, env.num_tasks - 1, min(env.num_tasks, NUM_RENDERED)).astype(int).tolist()
    return fingerprint_tokens([encode(env.problem(i)) for i in numbers])


def fingerprint_tokens(rows: Sequence[Sequence[int]]) -> str:
    """Returns the number of rows of token ids and a digest of them."""
    text = json.dumps([[int(i) for i in row] for row in rows])
    return f"{counted(len(rows), 'sample')}, digest {digest_of(text.encode())}"


def digest_of(*parts: bytes) -> str:
    """Returns a digest of bytes, one part after the other."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def stable(value: object) -> JSON:
    """Returns a substitute for a value that JSON lacks, equal in every process: no addresses, no order of a set."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def compare_processes(fingerprints: Mapping[str, str], layout: Layout) -> None:
    """Raises UserError, on all processes, when one of them sees other problems than process 0."""
    for name, here in fingerprints.items():
        if len({*layout.gather_values(here)}) > 1:
            raise UserError(
                f"processes see different contents of {name} (here: {here}): give all hosts the same files, library "
                "versions and revision of the data set"
            )
