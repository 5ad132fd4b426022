"""Which parameters are matrices of products: one list by hand, and all that casts, adapts or trains them by it."""

from pathlib import Path

import jax
import pytest

from core.terms.reference import copy_policy
from models.checkpoint import load_model, load_policy
from models.decoder import cast_params
from models.names import CRITIC
from models.optimizers import rate_name
from utils.devices.sharding import single_device
from utils.settings.groups import LoraConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
# A fixture of each family, and the sums of attention and linear attention.
NAMES = ("gemma3-tied", "llama-untied", "olmo3-tied", "qwen2-untied", "qwen3-tied", "qwen3_5-rest", "qwen3moe-untied",
         "smollm3-tied")  # fmt: skip
KINDS = {
    "embedding": ["model.embed_tokens.weight"],
    "head": ["lm_head.weight"],
    "router": ["mlp.gate.weight"],
    "experts": [f"mlp.experts.*.{part}_proj.weight" for part in ("gate", "up", "down")],
    "matrix": [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    + [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    + [f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    + ["linear_attn.out_proj.weight"],
    "vector": ["model.norm.weight", "input_layernorm.weight", "linear_attn.norm.weight", "linear_attn.conv1d.weight"]
    + [f"post_{part}_layernorm.weight" for part in ("attention", "feedforward")]
    + ["pre_feedforward_layernorm.weight", "linear_attn.A_log", "linear_attn.dt_bias"]
    + [f"self_attn.{part}_norm.weight" for part in "qk"]
    + [f"self_attn.{part}_proj.bias" for part in "qkv"],
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
RATES = {"embedding": "embedding_lr", "head": "unembedding_lr", "vector": "lr"}  # of Muon; the others: matrix_lr


def kinds_by_dtype(tree) -> dict[str, set[str]]:
    """The kinds of the parameters of each dtype, by the names before transposition."""
    found: dict[str, set[str]] = {}
    for path, x in jax.tree.leaves_with_path(tree):
        found.setdefault(str(x.dtype), set()).add(KIND_OF.get(path[-1].key.removesuffix(".T"), "scale"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_casts_muon_adapters_and_int8_agree_on_what_a_matrix_is(name):
    folder, layout = FIXTURES / name, single_device()
    model, params, _ = load_model(folder, layout, dtype="bfloat16")
    kinds = {KIND_OF[path[-1].key] for path, _ in jax.tree.leaves_with_path(params)}
    vectors, matrices = {"vector"}, kinds - {"vector"}
    cast = {
        "policy": cast_params(model, params),
        "reference": copy_policy({}, params, "bfloat16"),
        "teacher": load_model(folder, layout, dtype="bfloat16", param_dtype="bfloat16")[1],
        "base": load_policy(folder, LoraConfig(lora_rank=2), 0, layout, "bfloat16")[1],
    }
    for user, tree in cast.items():
        assert kinds_by_dtype(tree) == {"float32": vectors, "bfloat16": matrices}, user
    for path, x in jax.tree.leaves_with_path(params | {CRITIC: {"v_head.weight": params["model.norm.weight"][None]}}):
        expected = "critic_lr" if path[0].key == CRITIC else RATES.get(KIND_OF[path[-1].key], "matrix_lr")
        assert rate_name(path, x) == expected, path

    lora = LoraConfig(lora_rank=2, base_dtype="int8")
    _, base, adapters, _ = load_policy(folder, lora, 0, layout, "bfloat16")
    adapted = {KIND_OF[name.replace(f".lora_{part}", "")] for name in adapters for part in "AB" if part in name}
    assert adapted == kinds & {"matrix", "experts"}
    assert {rate_name((jax.tree_util.DictKey(name),), x) for name, x in adapters.items()} == {"matrix_lr"}
    scales = {"float32": vectors | {"scale"}, "int8": {"matrix"}, "bfloat16": matrices - {"matrix"}}
    assert kinds_by_dtype(base) == scales
