"""Checks a Hugging Face model folder and copies it to where the training commands look for it.

    python models/hf_to_jax.py --hf_dir ~/checkpoints/hf/Qwen3-1.7B/ --ckpt_dir ~/checkpoints/Qwen3-1.7B/

Nothing is converted: every command takes --hf_dir's folder as it is. Each tensor is checked against config.json, and
written with the dtype it had. Without options it takes the folders above, as kvfrans/lmpo's README does.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
from absl import app, flags

from models.checkpoint import load_model, resolve_model_dir, save_model
from utils.settings.errors import user_errors

FOLDERS = ("~/checkpoints/hf/Qwen3-1.7B/", "~/checkpoints/Qwen3-1.7B/")


def main(_):
    hf_dir, ckpt_dir = FLAGS.hf_dir, FLAGS.ckpt_dir or FLAGS.model_dir
    if not hf_dir and not ckpt_dir:
        hf_dir, ckpt_dir = FOLDERS
    if not hf_dir or not ckpt_dir:
        sys.exit("error: give --hf_dir, the folder to read, and --ckpt_dir, the folder to write")
    jax.config.update("jax_platforms", "cpu")  # the largest models fit the host's memory, not one accelerator's
    with user_errors():
        model, params, tokenizer = load_model(resolve_model_dir(hf_dir), param_dtype="")
        save_model(ckpt_dir, model, params, tokenizer)
    print(f"{hf_dir}: {model.num_parameters:,} parameters, complete; written to {ckpt_dir}")


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("hf_dir", "", "Hugging Face folder to read, or a run folder (its last step)")
    flags.DEFINE_string("ckpt_dir", "", "folder to write")
    flags.DEFINE_string("model_dir", "", "other spelling of --ckpt_dir")
    app.run(main)
