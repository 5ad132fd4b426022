"""Compares three steps of TRL's DPOTrainer with three of ours, for DPO and IPO: losses, rewards and parameters.

    pip install trl torch datasets
    python recipes/preferences/trl_dpo.py

Both train models/tiny, under a chat template that writes nothing behind a reply, on the same pairs, by their commands.
Exit status 1: something that should agree does not.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    import utils.settings.packages  # noqa: F401 (says what to install)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")

import numpy as np
import transformers
from safetensors.numpy import load_file

from core.sft import main as train
from recipes.preferences.dpo import LOSSES, DPOConfig, DPORun
from utils.settings.config import parse

try:
    import datasets
    import torch
    import trl
except ImportError:
    datasets = torch = trl = None  # `main` says what to install

MODEL = Path(__file__).resolve().parents[2] / "models/tiny"
TOLERANCE = 1e-5
STEPS, BETA, LR, EPSILON = 3, 0.1, 1e-3, 1e-2  # with a small epsilon, AdamW's first step is the sign of rounding errors
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\n\n</think>\n\n' }}{% endif %}"""
SAID = (("Use 3 4 to make 7.", "3+4=7", "no"), ("Use 9 2 to make 7.", "9-2", "9+2=11, so 9-2"), ("And 1 2?", "3", "21"))
PAIRS = [
    {
        "prompt": [{"role": "user", "content": asked}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    for asked, chosen, rejected in SAID
]
METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
Training = tuple[list[list[float]], dict[str, np.ndarray]]  # METRICS of each step; parameters after the last


def theirs(model: Path, folder: Path, loss: str) -> Training:
    """Returns what TRL's trainer logs and makes of the model."""
    arguments = trl.DPOConfig(
        str(folder), loss_type=[{"dpo": "sigmoid"}.get(loss, loss)], beta=BETA, learning_rate=LR,
        num_train_epochs=STEPS, per_device_train_batch_size=len(PAIRS), logging_steps=1, adam_epsilon=EPSILON,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = datasets.Dataset.from_list(PAIRS)
    trainer = trl.DPOTrainer(policy, args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    logs = [[log[name] for name in METRICS] for log in trainer.state.log_history if "loss" in log]
    return logs, {name: x.detach().numpy() for name, x in trainer.model.named_parameters()}


def ours(model: Path, folder: Path, loss: str) -> Training:
    """Returns the same of recipes/preferences/dpo.py."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    options: Sequence[object] = (
        *("--model_dir", model, "--data", folder / "pairs.jsonl", "--save_dir", folder / "run", "--loss", loss),
        *("--beta", BETA, "--lr", LR, "--num_epochs", STEPS, "--batch_size", len(PAIRS), "--adam_eps", EPSILON),
        *("--b2", 0.999, "--weight_decay", 0, "--test_fraction", 0, "--dtype", "float32"),
    )
    train(parse(DPOConfig, list(map(str, options))), DPORun)
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    logs = [[record[name if "/" in name else f"data/{name}"] for name in METRICS] for record in records]
    return logs, load_file(folder / f"run/step{STEPS}/model.safetensors")


def main() -> int:
    """Prints the table; 1 if anything does not agree."""
    if not trl:
        print("This comparison needs PyTorch and TRL: pip install trl torch datasets")
        return 0
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    is_equal = True
    print("| loss | step | " + " | ".join(METRICS) + " | apart, of 1 or the value |")
    print("|" + "---|" * (len(METRICS) + 3))
    for loss in LOSSES:
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
            folder, model = Path(name), Path(name) / "model"
            shutil.copytree(MODEL, model)
            (model / "chat_template.jinja").write_text(TEMPLATE)
            expected, trained = theirs(model, folder, loss)
            found, parameters = ours(model, folder, loss)
        for step, (row, other) in enumerate(zip(found, expected, strict=True), 1):
            apart = (np.abs(np.subtract(row, other)) / np.maximum(1, np.abs(other))).max()
            is_equal &= bool(apart <= TOLERANCE)
            print(f"| {loss} | {step} | " + " | ".join(f"{x:.6f}" for x in row) + f" | {apart:.0e} |")
        apart = max(np.abs(parameters[name] - trained[name]).max() for name in trained)
        moved = max(np.abs(x - load_file(MODEL / "model.safetensors")[name]).max() for name, x in parameters.items())
        is_equal &= bool(apart <= TOLERANCE)
        print(f"{loss}: after {STEPS} steps, parameters are {apart:.0e} apart at most, and have moved by {moved:.0e}")
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
