"""Text to token ids and back: a thin cover over transformers' fast tokenizers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing is meant so
import numpy as np
from jaxtyping import Int
from transformers import AutoTokenizer, PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", GENERATION_CONFIG,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its chat template and stop ids; `Tokenizer(hf)` covers one that is in memory already."""

    hf: PreTrainedTokenizerBase
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # what it was loaded from, saved unchanged

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: those of generation_config.json, then the tokenizer's own end of sequence."""
        ids = json.loads(self.files.get(GENERATION_CONFIG, b"{}")).get("eos_token_id") or []
        ids = [*(ids if isinstance(ids, list) else [ids]), self.hf.eos_token_id]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @property
    def pad_id(self) -> int:
        """The id that fills unused columns; masks and lengths, never this id, tell what is padding."""
        return next((i for i in (self.hf.pad_token_id, *self.stop_ids) if i is not None), 0)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing is added before or after it."""
        return self.hf.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, "A"]) -> str:
        """The text of the ids without special tokens (<|im_end|>); <think> is text, not a special token."""
        return self.hf.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(
        self, messages: Sequence[Mapping[str, str]], thinking: bool = False, prefix: str = "", plain: bool = False
    ) -> list[int]:
        """The ids of a conversation up to where the assistant speaks, then `prefix`, the beginning of its answer.

        `thinking=False` closes Qwen3's thinking before it starts. `plain` leaves the chat template out, as a base model
        without one does: then the contents of the messages stand one per line.
        """
        if plain or not self.hf.chat_template:
            return self.encode("\n".join(message["content"] for message in messages)) + self.encode(prefix)
        ids = self.hf.apply_chat_template(
            list(messages), add_generation_prompt=True, enable_thinking=thinking, return_dict=False
        )
        return ids + self.encode(prefix)

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files and generation_config.json into a folder.

        Files it was loaded from are written byte for byte: those that transformers 5 writes, version 4 cannot read.
        """
        directory = Path(directory)
        if not self.files:
            self.hf.save_pretrained(directory)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        if GENERATION_CONFIG not in self.files:
            generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
            (directory / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face folder.

    Raises: ValueError when the folder holds none.
    """
    folder = Path(folder).expanduser()
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: copy the tokenizer files of the model into it")
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    return Tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), files)
