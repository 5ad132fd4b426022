"""Downloads a model from the Hugging Face hub.

    python models/download_model.py --model_id Qwen/Qwen3-1.7B --dest_root_path ~/checkpoints/hf/

The folder is named after the model: ~/checkpoints/hf/Qwen3-1.7B.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from absl import app, flags, logging

from models.files import download


def main(_):
    logging.set_verbosity(logging.WARNING)  # the hub's client logs each of its requests
    folder = Path(os.path.expanduser(FLAGS.dest_root_path)) / FLAGS.model_id.rsplit("/", 1)[-1]
    try:
        print(f"{FLAGS.model_id} is in {download(FLAGS.model_id, folder)}")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("model_id", None, "owner/name on the hub", required=True)
    flags.DEFINE_string("dest_root_path", "~/checkpoints/hf", "folder that will hold the model's folder")
    app.run(main)
