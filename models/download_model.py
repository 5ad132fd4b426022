"""Downloads a model from the Hugging Face hub.

    python models/download_model.py --model_id Qwen/Qwen3-1.7B --dest_root_path ~/checkpoints/hf/

The folder is named after the model: ~/checkpoints/hf/Qwen3-1.7B.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import app, flags

from utils.settings.errors import UserError

FILES = ("*.json", "*.safetensors", "merges.txt", "*.jinja", "README.md")


def download(hub_id: str, folder: Path | None = None) -> Path:
    """Fetches a model's weights and tokenizer from the hub into `folder`, or into the hub's cache.

    Raises: UserError when that fails.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, local_dir=folder, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:  # no network, no such model, no permission; not an id
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"downloading {hub_id} from the Hugging Face hub failed: {reason}") from error


def main(_):
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
