"""Random models of odd shapes, made by transformers' classes, against the same folders loaded here.

    pip install torch peft
    python bench/families.py --num_models 100

For each model, against transformers in float64: the largest difference of logits, as a share of the largest logit, of
gradients, as a share of the largest number of all tensors, and greedy tokens. A model is equal within TOLERANCES, or no
farther from float64 than SLACK times transformers' own float32, or refused by a sentence with the field's name.
Exit status 1: one is neither.
"""

import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from models import decoder
from models.architecture import Decoder
from models.checkpoint import load_model, tensor_shapes
from models.names import Params
from utils.settings.errors import UserError

try:
    import torch
    import transformers

    from tests.make_fixtures import make_model, make_tokenizer, tensors_of
    from tests.references import select_tensor
except ImportError:
    torch = None  # `main` says what to install

TOLERANCES, SLACK = (3e-5, 1e-5), 3  # of logits, of gradients; some shapes lose digits in any float32
PROMPT, T = 9, 24  # tokens of the prompt of greedy decoding, and of a row
MIN_GAP = 1e-3  # between the two likeliest tokens: else the choice hangs on rounding
FAMILIES = ("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "SmolLM3", "Gemma3Text", "Olmo3", "Qwen3_5Text")
REFUSED = {  # by family: settings that this code does not compute, or that are read in two ways elsewhere
    "": [{"rope": {"rope_type": "dynamic", "factor": 2.0}}, {"hidden_act": "gelu"}],
    "Qwen2": [{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}],
    "Qwen3": [{"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}],
    "Qwen3Moe": [{"attention_bias": True}, {"mlp_only_layers": [0]}, {"use_sliding_window": True, "sliding_window": 4}],
    "Llama": [{"attention_bias": True}, {"mlp_bias": True}, {"rope": {"partial_rotary_factor": 0.5}}],
    "SmolLM3": [{"attention_bias": True}, {"mlp_bias": True}, {"use_sliding_window": True, "sliding_window": 4}],
    "Gemma3Text": [{"attn_logit_softcapping": 5.0}, {"final_logit_softcapping": 5.0}],
    "Olmo3": [{"attention_bias": True}, {"rope": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}}],
    "Qwen3_5Text": [{"attention_bias": True}],
}


def random_rope(rng: np.random.Generator) -> dict[str, float | str]:
    """Returns the parameters of a scaled rotary embedding, or none."""
    context = {"original_max_position_embeddings": int(rng.integers(4, 40))}
    factor = float(rng.uniform(1, 9))
    scalings = (
        {},
        {},
        {"rope_type": "linear", "factor": factor},
        {"rope_type": "yarn", "factor": factor} | context,
        {"rope_type": "yarn", "factor": factor, "attention_factor": 0.1 * float(np.log(factor)) + 1},
        {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | context,
    )
    return scalings[rng.integers(len(scalings))]


def random_shape(family: str, rng: np.random.Generator) -> tuple:
    """Returns what `make_model` takes: class, width, heads, heads of keys, channels, and other fields."""
    kv_heads, head_dim = int(rng.integers(1, 4)), 2 * int(rng.integers(2, 9))
    heads = kv_heads * int(rng.integers(1, 5))
    hidden = heads * int(rng.integers(2, 9))
    num_layers = int(rng.integers(1, 6))
    others = {
        "num_hidden_layers": num_layers, "intermediate_size": int(rng.integers(3, 50)),
        "rms_norm_eps": float(10.0 ** -rng.integers(2, 7)), "tie_word_embeddings": bool(rng.integers(2)),
        "rope_theta": float(10 ** rng.uniform(2, 6)), "rope": random_rope(rng), "initializer_range": 0.25,
    }  # fmt: skip
    if family in ("Gemma3Text", "Olmo3"):
        others |= {"sliding_window": int(rng.integers(1, 12)), "pattern": int(rng.integers(2, 5))}
    if family == "Gemma3Text":
        others["query_pre_attn_scalar"] = int(rng.integers(2, 40))
    if family == "SmolLM3":
        others["no_rope_layers"] = rng.integers(0, 2, num_layers).tolist()
    if family == "Qwen3Moe":
        num_experts = int(rng.integers(2, 9))
        others |= {
            "num_experts": num_experts, "num_experts_per_tok": int(rng.integers(1, num_experts + 1)),
            "moe_intermediate_size": int(rng.integers(3, 30)), "norm_topk_prob": bool(rng.integers(2)),
        }  # fmt: skip
    if family == "Qwen3_5Text":
        key_heads, kinds = int(rng.integers(1, 4)), ["linear_attention", "full_attention"]
        others |= {
            "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * int(rng.integers(1, 4)),
            "linear_key_head_dim": int(rng.integers(2, 11)), "linear_value_head_dim": int(rng.integers(4, 11)),
            "linear_conv_kernel_dim": int(rng.integers(2, 6)), "rope": {"partial_rotary_factor": 0.5},
            "layer_types": [*(kinds[i] for i in rng.integers(0, 2, num_layers - 1)), "full_attention"],
        }  # fmt: skip
        head_dim = 4 * head_dim
    if rng.random() < 0.2:
        choices = REFUSED[family] + (REFUSED[""] if family not in ("Gemma3Text", "Qwen3_5Text") else [])
        refused = choices[rng.integers(len(choices))]
        others |= refused
    return getattr(transformers, f"{family}Config"), hidden, heads, kv_heads, head_dim, others


class Result(NamedTuple):
    """Results of a model: logits, gradients by tensor, greedy tokens, and their least gap to the next ones."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    greedy: np.ndarray
    gap: float = 1.0

    def errors(self, exact: "Result") -> np.ndarray:
        """Returns what TOLERANCES are for."""
        largest = max(np.abs(x).max() for x in exact.gradients.values())
        apart = max(np.abs(self.gradients[name] - x).max() for name, x in exact.gradients.items())
        logits = np.abs(self.logits - exact.logits).max() / max(1.0, np.abs(exact.logits).max())
        return np.array([logits, apart / largest])


def reference(folder: Path, tokens: np.ndarray, dtype: "torch.dtype") -> Result:
    """Returns what transformers computes."""
    settings = {"dtype": dtype, "experts_implementation": "eager"}  # its other kernels want wider experts
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)
    ids = torch.tensor(tokens)
    logits = model(ids).logits
    logprobs = logits[:, :-1].log_softmax(-1)
    (-logprobs.gather(-1, ids[:, 1:, None]).mean()).backward()
    gradients = {}
    for name, x in model.named_parameters():
        gradients |= tensors_of(name, x.grad.numpy())
    output = model.generate(
        ids[:, :PROMPT], attention_mask=torch.ones_like(ids[:, :PROMPT]), do_sample=False, max_new_tokens=T - PROMPT,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True, use_cache=False,
    )  # fmt: skip (with a cache and a window of one token its own forward pass chooses other tokens)
    top = torch.stack(output.scores).topk(2).values
    gap = float((top[..., 0] - top[..., 1]).min())
    return Result(logits.detach().numpy(), gradients, output.sequences.numpy(), gap)


def loss(model: Decoder, tokens: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
    logits = decoder.logits(model, params, tokens)
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1).mean(), logits


def ours(folder: Path, tokens: np.ndarray) -> Result:
    """Returns what this code computes. Raises: UserError for a model that is not supported."""
    model, params, _ = load_model(folder)
    differentiate = jax.jit(jax.value_and_grad(partial(loss, model), argnums=1, has_aux=True))
    (_, logits), gradient = differentiate(jnp.asarray(tokens), params)
    layers_with = model.layers_with()
    gradients = {name: np.asarray(select_tensor(layers_with, gradient, name)) for name in tensor_shapes(model)}
    rows = tokens.copy()
    for i in range(PROMPT, T):
        (_, drawn), _ = differentiate(jnp.asarray(rows), params)
        rows[:, i] = np.asarray(drawn)[:, i - 1].argmax(-1)
    return Result(np.asarray(logits), gradients, rows)


def main(_: list[str]) -> int:
    if torch is None:
        print("This comparison needs PyTorch and peft: pip install torch peft")
        return 0
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts, worst, status = Counter(), {}, 0
    for seed in range(FLAGS.first, FLAGS.first + FLAGS.num_models):
        rng = np.random.default_rng(seed)
        family = FAMILIES[seed % len(FAMILIES)]
        shape = random_shape(family, rng)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            torch_model = make_model(seed, *shape)
            torch_model.save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            tokens = rng.integers(0, torch_model.config.vocab_size, (2, T)).astype(np.int32)
            try:
                found = ours(folder, tokens)
            except UserError as error:
                outcome, text = "refused", str(error).replace(str(folder), "").strip("/")
            else:
                exact = reference(folder, tokens, torch.float64)
                errors = found.errors(exact)
                theirs = reference(folder, tokens, torch.float32).errors(exact)
                is_greedy = exact.gap < MIN_GAP or (found.greedy == exact.greedy).all()
                is_equal = is_greedy and (errors <= np.maximum(TOLERANCES, SLACK * theirs)).all()
                outcome = "equal" if is_equal else "DIFFERENT"
                text = "logits {:.0e}, gradients {:.0e}, theirs {:.0e}, {:.0e}".format(*errors, *theirs)
                worst[family] = np.maximum(worst.get(family, 0), [*errors, *theirs])
        counts[family, outcome] += 1
        status |= outcome == "DIFFERENT"
        fields = shape[1:] if outcome == "DIFFERENT" else ""
        print(f"{seed:4} {family:<12}{outcome:<10}{text} {fields}", flush=True)
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}, jax {jax.__version__}")
    print(f"{'family':<13}{'equal':>7}{'refused':>9}{'different':>11}{'logits':>9}{'gradients':>11}{'theirs':>9}{'':>8}")
    for family in FAMILIES:
        row = (counts[family, outcome] for outcome in ("equal", "refused", "DIFFERENT"))
        errors = worst.get(family, (0, 0, 0, 0))
        print("{:<13}{:>7}{:>9}{:>11}{:>9.0e}{:>11.0e}{:>9.0e}{:>8.0e}".format(family, *row, *errors))
    return status


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_integer("num_models", 100, "models to compare")
    flags.DEFINE_integer("first", 0, "seed of the first one")
    app.run(main)
