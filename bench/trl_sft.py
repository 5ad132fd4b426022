"""Compares TRL's loss on the replies of conversations with that of core/sft.py: tokens, value, gradient of each tensor.

    pip install trl torch datasets
    python bench/trl_sft.py

SFTTrainer is made as its users make it, with assistant_only_loss, for models/tiny and a template with {% generation %},
which TRL needs. Both train the softmax of float32 logits. Exit status 1: something that should agree does not.
"""

import logging
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from safetensors.numpy import load_file

from core.learner import make_learner
from core.objectives import set_loss_denominators
from core.sampler import SamplingConfig
from core.sft import SFTConfig, make_batch
from models.checkpoint import load_policy, save_model
from models.conversations import encode_rows
from utils.devices.sharding import single_device
from utils.settings.config import make_config

try:
    import datasets
    import torch
    import trl
except ImportError:
    datasets = torch = trl = None  # `main` says what to install

MODEL = Path(__file__).resolve().parent.parent / "models/tiny"
TOLERANCE = 1e-5
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% generation %}{{ m.content }}<|im_end|>\
{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"""
SAID = ("Use 3 4 to make 7.", "3+4=7", "Once more, please.", "4+3=7", "And again?", "<answer>4+3</answer>")
TURNS = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(SAID)]
SYSTEM = {"role": "system", "content": "Be short."}
ROWS = [[SYSTEM, *TURNS], TURNS[:2], TURNS[2:], TURNS[:4]]  # of three turns, one, two and two


def theirs(folder: str) -> tuple[float, dict[str, np.ndarray], list[list[int]]]:
    """Returns TRL's loss of all rows, its gradient by tensor, and the trained ids of each row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    arguments = trl.SFTConfig(
        folder, assistant_only_loss=True, max_length=512, per_device_train_batch_size=len(ROWS), report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"messages": row} for row in ROWS])
    trainer = trl.SFTTrainer(str(MODEL), arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.model.float().train()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    trained = [row[row != -100].tolist() for row in batch["labels"]]
    gradient = {name: x.grad.numpy() for name, x in trainer.model.named_parameters() if x.grad is not None}
    return loss.item(), gradient, sorted(trained)


def ours(folder: str) -> tuple[float, dict[str, np.ndarray], list[list[int]]]:
    """Returns the same of the learner, whose gradient is written as a folder of Hugging Face's tensors."""
    config = make_config(SFTConfig, data="-", batch_size=len(ROWS))
    config = replace(config, sampling=SamplingConfig(prompt_length=1))
    layout = single_device()
    model, _, params, tokenizer = load_policy(MODEL, config.lora, 0, layout, "float32")
    rows, _ = encode_rows(tokenizer, "rows", ROWS, 512, "error")
    batch = make_batch(rows)
    learner, state = make_learner(config, model, params, layout, max(map(len, rows)) - 1)
    minibatch = set_loss_denominators(batch, len(rows), 512, config.objective.policy)
    parts = [learner.add_up(state.params, chain)[0] for chain in learner.chains(minibatch, learner.shapes)]
    gradient, loss = jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts) if len(parts) > 1 else parts[0]
    save_model(Path(folder) / "gradient", model, gradient, tokenizer)
    trained = [row.tokens[row.mask].tolist() for row in rows]
    return float(jnp.asarray(loss)), load_file(Path(folder) / "gradient/model.safetensors"), sorted(trained)


def main() -> int:
    """Prints the table; 1 if anything does not agree."""
    if not trl:
        print("This comparison needs PyTorch and TRL: pip install trl torch datasets")
        return 0
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        expected, gradient, trained = theirs(folder)
        loss, found, own = ours(folder)
    apart = {name: np.abs(found[name] - gradient[name]).max() for name in gradient}
    largest = max(np.abs(x).max() for x in gradient.values())
    print(f"trl {trl.__version__}, torch {torch.__version__}, {len(ROWS)} rows of {sum(map(len, own))} trained tokens")
    print(f"the same tokens are trained: {trained == own}")
    print(f"loss: {expected:.7f} and {loss:.7f}, {abs(expected - loss):.0e} apart")
    print(f"gradient: {len(apart)} tensors, {max(apart.values()):.0e} apart at most, of up to {largest:.2g}")
    return int(trained != own or abs(expected - loss) > TOLERANCE or max(apart.values()) > TOLERANCE * max(1, largest))


if __name__ == "__main__":
    sys.exit(main())
