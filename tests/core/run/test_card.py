"""The model card of a saved folder: it parses, its numbers are the run's, and nothing breaks out of its blocks."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub import ModelCard as HubCard

from core.config import Config
from core.records import Progress
from core.run import card as cards
from core.run.card import ModelCard, find_version
from core.run.folder import settings_of_model
from envs.settings import resolve_environments
from models.checkpoint import save_model
from tests.references import FIXTURES, load
from utils.settings.config import make_config, parse, to_dict

HELD_OUT = {"test_env_name": "countdown-test"}
BLOCK = re.compile(r"^(?P<fence>`{3,})(\w+)\n(.*?)\n(?P=fence)$", re.MULTILINE | re.DOTALL)


def card_of(**options) -> ModelCard:
    config = make_config(Config, **{"env_name": "countdown"} | options)
    environments = resolve_environments(config.env, config.held_out, config.sampling)
    return ModelCard(Config, to_dict(config), environments)


def blocks(text: str) -> dict[str, str]:
    """Returns the code blocks of a card by their language, as CommonMark delimits them."""
    return {language: content for _, language, content in BLOCK.findall(text)}


@pytest.mark.parametrize(("model_dir", "base_model"), [("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B"), ("models/tiny", None)])
@pytest.mark.parametrize(("lora_rank", "library"), [(0, "transformers"), (8, "peft")])
def test_the_front_matter_is_what_the_hub_reads(model_dir, base_model, lora_rank, library):
    data = HubCard(card_of(model_dir=model_dir, lora_rank=lora_rank).render(Progress(3), {})).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == (base_model, library, "text-generation")
    assert data.tags == ["grpo", "reinforcement-learning", "lmpo"]


def test_the_licence_is_that_of_the_base(tmp_path):
    def license_of(text):
        (tmp_path / "README.md").write_text(text)
        return HubCard(card_of(model_dir=str(tmp_path)).render(Progress(3), {})).data.get("license")

    assert license_of("---\nlicense: apache-2.0\n---\n# Model") == "apache-2.0"
    assert license_of("---\nlicense: [x\n---\n") is license_of("# Model") is None
    assert license_of("---\n- license\n---\n") is None


@pytest.mark.parametrize("prefix", ["it's: ", '"$HOME" `id` <think>\n---\n', "\udcff"])
def test_the_command_trains_the_same_whatever_is_in_it(prefix):
    style = {"env_options": f"prefix={prefix},numbers=3", "do_group_filter": True, "lr": 3e-7, "wandb_name": "private"}
    card = card_of(**style, wandb_project="http://me:secret@host")
    text = card.render(Progress(3, num_rollouts=24), {})
    assert "secret" not in text
    assert "private" not in text
    assert re.findall(r"^(?:---|#+ .*)$", BLOCK.sub("", text), re.MULTILINE) == [
        "---",
        cards.CARD_MARK,
        "---",
        "# countdown by reinforcement learning, step 3",
        "## Held-out scores",
    ]
    program, script, *argv = shlex.split(blocks(text)["sh"])
    assert (program, script) == ("python", "core/grpo.py")
    assert to_dict(parse(Config, argv)) == dict(card.settings) | {"wandb_name": "", "wandb_project": ""}
    _, _, *argv = shlex.split(blocks(card_of(env_name="poem").render(Progress(3), {}))["sh"])
    assert parse(Config, argv, implied=settings_of_model).env.env_name == "poem", "and not the demo of models/tiny"


def test_scores_are_those_of_the_first_and_the_last_evaluation():
    steps = np.array([0.0, 10, 20])
    values = {
        "correct_answer": [0.1234, 0.5, 0.75],
        "correct_answer_low": [0.1, 0.4, 0.7],
        "return": [-1, 2.5, 3],
    }
    values |= {"correct_answer_high": [0.15, 0.6, 0.8], "return_ci": [0.25, 0.25, 0.5]}
    values |= {"num_tasks": [64] * 3, "num_samples": [2] * 3}
    run = {f"test_env/{name}": (steps, np.array(column, float)) for name, column in values.items()}
    table = card_of(**HELD_OUT).render(Progress(23), run).splitlines()[-2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    correct = ["12.3% [10.0%, 15.0%] (step 0)", "75.0% [70.0%, 80.0%] (step 20)"]
    of = "countdown-test (64 problems): "
    assert cells[0] == [f"{of}correct_answer", *correct]
    assert cells[1] == [f"{of}return", "-1 [-1.25, -0.75] (step 0)", "3 [2.5, 3.5] (step 20)"]
    once = {name: (steps[:1], column[:1]) for name, (steps, column) in run.items()}
    assert "-1 [-1.25, -0.75] (step 0) | not evaluated again |" in card_of(**HELD_OUT).render(Progress(3), once)
    assert cards.NO_SCORES in card_of(**HELD_OUT).render(Progress(23), {})


def test_scores_are_compared_since_their_meaning_changed():
    run = {"test_env/return": (np.array([0.0, 10, 20, 30]), np.array([1.0, 2, 3, 4]))}
    segments = [{"step": 10, "text": "--lr is 2 now and was 1"}]
    card = replace(card_of(**HELD_OUT), segments=segments)
    text = card.render(Progress(33), run)
    assert "| 3 (step 20) | 4 (step 30) |" in text
    assert "Scores up to step 10 were measured with other data or settings" in text
    assert "from step 11 on: --lr is 2 now and was 1" in blocks(text)["text"]
    assert cards.NO_SCORES not in replace(card, segments=[segments[0] | {"step": 40}]).render(Progress(43), run)


def test_a_readme_of_ones_own_is_kept(tmp_path):
    model, params, tokenizer = load(FIXTURES / "qwen3-tied")
    folder = tmp_path / "model"
    file = tmp_path / "model" / "README.md"
    first, second = (card_of().render(Progress(step), {}) for step in (1, 2))
    for card in (first, second):
        save_model(folder, model, params, tokenizer, card=card)
        assert file.read_text() == card
    save_model(folder, model, params, tokenizer)
    assert not file.exists(), "a card of another model"
    file.write_text("My notes")
    save_model(folder, model, params, tokenizer, card=first)
    assert file.read_text() == "My notes"


def test_the_commit_is_named_in_a_checkout_only(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2"\n')
    # A folder without a repository, then one whose repository is broken.
    monkeypatch.setattr(cards, "ROOT", tmp_path)
    assert find_version() == "version 1.2"
    (tmp_path / ".git").mkdir()  # no repository: git fails
    assert find_version() == "version 1.2"
