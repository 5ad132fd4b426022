"""Data sets as they are published, in the folder of a hub on this machine."""

import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from tests.helpers import read_jsonl
from tests.kill_runs import ROOT
from tests.local_hub import put

SAMPLES = ROOT / "tests" / "fixtures" / "data"


def parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sample(file: str) -> list[dict]:
    return read_jsonl(SAMPLES / file)


def published(root: Path) -> None:
    """Writes the data sets that environments name, laid out as on the hub."""
    gsm8k = {f"main/{split}-00000-of-00001.parquet": sample(f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    other = {name.replace("main", "socratic"): [{"question": "no", "answer": "#### 1"}] for name in gsm8k}
    put(root, "openai/gsm8k", {n: parquet(rows) for n, rows in (gsm8k | other).items()})
    deepscaler = json.dumps(sample("deepscaler/deepscaler.jsonl"))
    put(root, "agentica-org/DeepScaleR-Preview-Dataset", {"README.md": "# no head", "deepscaler.json": deepscaler})
    for name, file in (("HuggingFaceH4/aime_2024", "aime/aime24"), ("MathArena/aime_2025", "aime/aime25")):
        rows = parquet(sample(f"{file}.jsonl"))
        put(root, name, {"data/train-00000-of-00001.parquet": rows})
    amc = parquet(sample("amc/amc_2022_2023.jsonl"))
    put(root, "AI-MO/aimo-validation-amc", {"data/train-00000-of-00001.parquet": amc})
    put(root, "zwhe99/amc23", {"data/test-00000-of-00001.parquet": parquet(sample("amc/amc23.jsonl"))})
    put(root, "HuggingFaceH4/MATH-500", {"test.jsonl": jsonl(sample("math500/math500.jsonl"))})
    countdown = {"data/train-00000-of-00001.parquet": parquet(sample("countdown/train.jsonl"))}
    put(root, "Jiayi-Pan/Countdown-Tasks-3to4", countdown)
