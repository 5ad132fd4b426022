"""TRL's GRPO beside ours on a real run: the same weights, adapters, prompts, rows and limits; seconds a step.

    pip install trl peft datasets    # into an environment of its own: ~/venv-trl
    python bench/trl_grpo.py runs/coder-gsm8k/run --python ~/venv-trl/bin/python --steps 4

The folder is a run of core/grpo.py, or has its config.json; its answers are numbers. Both begin it anew, first ours,
then TRL on the prompts of our steps, each in a process of its own. The first step, in which they compile, is not
counted. TRL samples by transformers, as it does by default, in the run's --dtype unless --their_dtype names another,
with sdpa attention, micro-batches of --microbatch rows and no checkpointing.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from transformers import AutoTokenizer

from envs import make_env, parse_options
from envs.grading.answers import final_answer
from envs.grading.numerals import same_number
from utils.files import read_arrays

try:
    import datasets
    import peft
    import torch
    import trl
    from transformers import AutoModelForCausalLM, TrainerCallback
except ImportError:  # of the process that runs ours
    TrainerCallback = object

ROOT = Path(__file__).resolve().parent.parent


def reward(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """Returns 1 for each reply whose box has the right number, as ours."""
    given = [final_answer(text, "boxed") for text in completions]
    pairs = zip(given, answer, strict=True)
    return [float(one is not None and same_number(right, one)) for one, right in pairs]


class Clock(TrainerCallback):
    """Prints the seconds of each step."""

    def on_step_begin(self, args, state, control, **_) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **_) -> None:
        print(json.dumps({"seconds": time.perf_counter() - self.start, "peak_gb": peak_gb()}), flush=True)


def train_theirs(work: dict, folder: str) -> None:
    """Runs TRL's trainer, and prints a line of JSON for each step."""
    settings, microbatch = work["settings"], work["microbatch"]
    is_cpu, dtype = not torch.cuda.is_available(), work["their_dtype"] or settings["dtype"] or "bfloat16"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    num_rows = settings["groups_per_batch"] * settings["group_size"]
    arguments = trl.GRPOConfig(
        folder, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=is_cpu,
        bf16=dtype == "bfloat16", optim="adamw_torch_fused", learning_rate=settings["lr"], lr_scheduler_type="constant",
        max_steps=len(work["rows"]) // settings["groups_per_batch"], beta=0.0, gradient_checkpointing=False,
        per_device_train_batch_size=microbatch, gradient_accumulation_steps=num_rows // microbatch,
        num_generations=settings["group_size"], max_completion_length=settings["num_generation_tokens"],
        temperature=settings["temperature"], top_k=0, top_p=1.0, shuffle_dataset=False, dataloader_pin_memory=False,
    )  # fmt: skip
    matrices = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    rank, alpha = settings["lora_rank"], settings["lora_alpha"]
    adapters = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=matrices) if rank else None
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(settings["model_dir"], dtype=getattr(torch, dtype)), reward, arguments,
        datasets.Dataset.from_list(work["rows"]), callbacks=[Clock()], peft_config=adapters,
        processing_class=AutoTokenizer.from_pretrained(settings["model_dir"], padding_side="left"),
    )  # fmt: skip
    trainer.train()


def peak_gb() -> float:
    """Returns the most memory that this process has had, in GB: of a GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def train_ours(settings: dict, folder: Path) -> tuple[list[dict], list[dict]]:
    """Runs core/grpo.py; returns the metrics of its steps, and the prompts and answers of all groups."""
    preset = folder / "preset.yaml"
    preset.write_text(json.dumps(settings))
    command = [sys.executable, "core/grpo.py", "--config", str(preset), "--save_dir", str(folder / "run")]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_rows(folder / "run/metrics.jsonl"), prompts_of(settings, folder / "run")


def prompts_of(settings: dict, run: Path) -> list[dict]:
    """Returns the prompt and the answer of each group, in the order of a run."""
    env = make_env(settings["env_name"], **parse_options(settings["env_options"]))
    tokenizer, found = AutoTokenizer.from_pretrained(settings["model_dir"]), []
    for step in range(1, settings["max_steps"] + 1):
        rows = read_arrays(run / f"rollouts/step_{step}.npz")
        for row in range(0, len(rows["tasks"]), settings["group_size"]):
            ids = rows["tokens"][row, : rows["prompt_lengths"][row]]
            answer = env.problem(int(rows["tasks"][row])).answer
            found.append({"prompt": tokenizer.decode(ids), "answer": answer["answer"]})
    return found


def read_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main(options: argparse.Namespace) -> None:
    """Prints the seconds of a step of each, and their ratio."""
    settings = json.loads((options.run / "config.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "run"}
    settings |= {"test_env_name": "", "save_interval": 0, "save_rollouts": "all", "max_steps": options.steps + 1}
    with tempfile.TemporaryDirectory() as name:
        steps, rows = train_ours(settings, Path(name))
        show("ours", ours := [step["times/step"] for step in steps[1:]], steps[-1]["memory/peak_gb"])
        work = Path(name, "work.json")
        theirs = {"settings": settings, "rows": rows, "microbatch": options.microbatch}
        work.write_text(json.dumps(theirs | {"their_dtype": options.their_dtype}))
        command = [os.path.expanduser(options.python), __file__, "theirs", str(work), name]
        lines = []
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in filter(lambda line: line.startswith('{"'), process.stdout):
                print("TRL", line, end="", flush=True)
                lines.append(json.loads(line))
        if process.returncode:
            raise SystemExit(process.returncode)
    show("TRL", theirs := [line["seconds"] for line in lines[1:]], lines[-1]["peak_gb"])
    print(f"TRL / ours: {statistics.median(theirs) / statistics.median(ours):.2f}")


def show(side: str, seconds: Sequence[float], peak: float) -> None:
    each = ", ".join(f"{x:.1f}" for x in seconds)
    print(f"{side}: {statistics.median(seconds):.1f} s a step ({each}), {peak:.1f} GB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["theirs"]:
        train_theirs(json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("run", type=Path, help="folder of a run of core/grpo.py")
        parser.add_argument("--python", default="python", help="Python that has TRL, peft and datasets")
        parser.add_argument("--steps", type=int, default=4, help="steps of each, behind the first")
        parser.add_argument("--microbatch", type=int, default=8, help="rows of TRL's micro-batches")
        parser.add_argument("--their_dtype", default="", help="TRL's dtype; default: the run's")
        main(parser.parse_args())
