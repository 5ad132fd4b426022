"""Makes models/tiny: a 0.85M-parameter Qwen3 that can search for Countdown solutions, but gives up too early.

    python models/make_tiny.py            # 40 minutes on two cores; resumes where it was stopped

1. Tokenizer: byte-level BPE of 512 ids with Qwen's split pattern, each number 0-99 one token, a ChatML template.
2. Pre-training: next-token prediction on synthetic replies. A reply tries combinations of three numbers one by one, in
   random order and never twice, computes each, checks it against the target, stops at a hit, and gives up after a miss
   with the probability of its mood: most replies are impatient, some are not. A few documents are plain arithmetic.

What it leaves for RL to find: keep searching, and try the promising combinations first. The number sets of Countdown's
test split never occur.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from absl import app, flags
from jaxtyping import Float, Int
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from envs.countdown import PROMPTS, Countdown
from models.architecture import Decoder
from models.checkpoint import save_model
from models.decoder import forward, head, init_params
from models.names import Array, Params
from models.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
COUNTDOWN = dict(numbers=3, min_number=1, max_number=15, max_target=30, expression="tree", max_value=30, prompt="bare")
MODEL = Decoder(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, remat="none", unroll=True,
)  # fmt: skip
MOOD_SHARES = (0.85, 0.15)  # of the replies
GIVE_UP = (0.6, 0.04)  # probability to give up after a miss in each mood
MAX_TRIES = 13
SHARE_DRILLS = 0.15
ROWS = 48
BATCHES_PER_CHUNK = 64  # that are sorted by length together
STEPS = 6000
WARMUP = 100
DECAY = 0.4  # the last share of the steps, linear to LR / 100
LR = 3e-3
LOG_INTERVAL = 100
SAVE_INTERVAL = 500
RESULT_WEIGHT = 3.0  # of the loss on computed numbers and on the verdict of a check

SPLIT = (  # Qwen2's pattern, with up to two digits in a token
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)


def arithmetic(a: int, op: str, b: int) -> int | None:
    """Returns the result if this step stays within the positive integers that the model knows, larger operand first."""
    if op in "+*-" and a < b:
        return None
    if op == "/" and (b == 0 or a % b):
        return None
    quotient = a // b if b else 0
    result = {"+": a + b, "-": a - b, "*": a * b, "/": quotient}[op]
    return result if 0 < result <= COUNTDOWN["max_value"] else None


def combinations(numbers: tuple[int, int, int]) -> dict[str, tuple[str, int]]:
    """Returns every way to combine three numbers in two steps: {steps: (expression, result)}."""
    ways = {}
    for i, j, rest in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        for op in "+-*/":
            ways |= second_steps(numbers[i], op, numbers[j], numbers[rest])
    return ways


def second_steps(a: int, op: str, b: int, c: int) -> dict[str, tuple[str, int]]:
    """Returns every way to go on from a op b with c."""
    ways = {}
    inner = arithmetic(a, op, b)
    if not inner:
        return ways
    for op2 in "+-*/":
        orders = (inner, c, f"({a}{op}{b}){op2}{c}"), (c, inner, f"{c}{op2}({a}{op}{b})")
        for x, y, expression in orders:
            result = arithmetic(x, op2, y)
            if result is not None:
                steps = f"{a}{op}{b}={inner},{x}{op2}{y}={result}"
                ways[steps] = (expression, result)
    return ways


def reply(numbers: tuple[int, ...], target: int, rng: random.Random) -> str:
    """Writes one search as the base model shall imitate it."""
    give_up = rng.choices(GIVE_UP, MOOD_SHARES)[0]
    tries = list(combinations(numbers).items())
    rng.shuffle(tries)
    tries = tries[:MAX_TRIES]
    text = "<think>\n"
    for i, (steps, (expression, result)) in enumerate(tries, 1):
        is_hit = result == target
        text += f"{steps}?{target}{'✓' if is_hit else '✗'}\n"
        if is_hit or rng.random() < give_up or i == len(tries):
            return text + f"</think>\n<answer>{expression}</answer>"
    raise AssertionError(f"no combination of {numbers}")


def drill(rng: random.Random) -> str:
    """Writes a list of single steps, so that every sum, difference, product and quotient is seen often."""
    lines = []
    while len(lines) < 15:
        a = rng.randint(1, 30)
        b = rng.randint(1, 30)
        op = rng.choice("+-*/")
        if op in "*/":
            b = rng.randint(1, 15)
        if op == "*":
            a = rng.randint(b, max(b, 30 // b))
        if op == "/":
            a = b * rng.randint(1, 30 // b)
        result = arithmetic(a, op, b)
        if result is not None:
            lines.append(f"{a}{op}{b}={result}")
    return ",".join(lines)


def make_corpus() -> list[str]:
    """Returns the texts that the tokenizer is trained on: replies, arithmetic, the prompts and every number."""
    rng = random.Random(0)
    env = Countdown(**COUNTDOWN)
    numbers_to_99 = " ".join(map(str, range(100)))
    corpus = [numbers_to_99] * 1000
    corpus += [drill(rng) for _ in range(500)]
    for i in range(1000):
        numbers, target = env.instance(i)
        prompt = env.problem(i).messages[0]["content"]
        corpus += [prompt, reply(numbers, target, rng), PROMPTS["full"]]
    corpus += ["Write a poem about the sea. user assistant system\nuser\nassistant\nsystem"] * 1000
    return corpus


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the 512 ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tags = ["<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_merged = MODEL.vocab_size - len(special) - len(tags)
    trainer = trainers.BpeTrainer(vocab_size=num_merged, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(make_corpus(), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


Document = tuple[list[int], list[int]]  # ids of a prompt, and of its reply
TokenRows = tuple[Int[np.ndarray, "B T"], Float[np.ndarray, "B T"]]  # tokens, weights of the loss


def make_document(tokenizer: PreTrainedTokenizerFast, env: Countdown, i: int, rng: random.Random) -> tuple[str, str]:
    """Writes a prompt and its reply, or a drill without a prompt."""
    if rng.random() < SHARE_DRILLS:
        return "", drill(rng)
    problem = env.problem(i)
    prompt = tokenizer.apply_chat_template(problem.messages, tokenize=False, add_generation_prompt=True)
    return prompt, reply(*problem.answer, rng) + "<|im_end|>"


def make_chunk(tokenizer: PreTrainedTokenizerFast, env: Countdown, chunk: int) -> list[list[Document]]:
    """Returns BATCHES_PER_CHUNK batches of documents of similar length, in random order."""
    rng = random.Random(f"pretraining {chunk}")
    size = BATCHES_PER_CHUNK * ROWS
    numbers = range(chunk * size, (chunk + 1) * size)
    documents = [make_document(tokenizer, env, i, rng) for i in numbers]
    prompts = tokenizer([prompt for prompt, _ in documents])["input_ids"]
    replies = tokenizer([text for _, text in documents])["input_ids"]
    rows = sorted(zip(prompts, replies, strict=True), key=num_tokens)
    batches = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
    rng.shuffle(batches)
    return batches


def num_tokens(document: Document) -> int:
    """Returns the tokens of a prompt and its reply."""
    prompt, answer = document
    return len(prompt) + len(answer)


def pad_documents(documents: list[Document]) -> TokenRows:
    """Returns right-padded tokens, and weights of 1 on those of the replies."""
    longest = max(map(num_tokens, documents))
    length = -(-longest // 16) * 16
    tokens = np.zeros((ROWS, length), np.int32)
    weights = np.zeros((ROWS, length), np.float32)
    for i, (prompt, answer) in enumerate(documents):
        end = len(prompt) + len(answer)
        tokens[i, :end] = prompt + answer
        weights[i, len(prompt) : end] = 1.0
    return tokens, weights


def make_batches(tokenizer: PreTrainedTokenizerFast, env: Countdown, start: int) -> Iterator[TokenRows]:
    """Yields batches number `start` and following, without end; each is a pure function of its number."""
    chunk, offset = divmod(start, BATCHES_PER_CHUNK)
    while True:
        batches = make_chunk(tokenizer, env, chunk)
        for documents in batches[offset:]:
            yield pad_documents(documents)
        chunk += 1
        offset = 0


class ResultTokens(NamedTuple):
    """Tokens whose result the model must compute: what follows an equals sign, and the verdict of a check."""

    equals: int
    hit: int
    miss: int


class TrainState(NamedTuple):
    """Parameters and optimiser state."""

    params: Params
    opt_state: optax.OptState


Metrics = tuple[Float[Array, ""], Float[Array, ""]]  # loss in nats, share of results that are the likeliest token
Update = Callable[[TrainState, Array, Array], tuple[TrainState, Metrics]]


def find_result_tokens(tokenizer: PreTrainedTokenizerFast) -> ResultTokens:
    """Returns the ids of these tokens, each the last of a text."""
    return ResultTokens(
        equals=tokenizer.encode("=")[-1],
        hit=tokenizer.encode("?24✓\n")[-1],
        miss=tokenizer.encode("?24✗\n")[-1],
    )


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW whose learning rate rises, stays, and decays to LR / 100."""
    num_decay = int(num_steps * DECAY)
    constant = optax.warmup_constant_schedule(0.0, LR, WARMUP)
    decay = optax.linear_schedule(LR, LR / 100, num_decay)
    schedule = optax.join_schedules([constant, decay], [num_steps - num_decay])
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def loss(params: Params, ids: ResultTokens, tokens: Int[Array, "B T"], weights: Float[Array, "B T"]) -> Metrics:
    """Returns the weighted cross-entropy, nats, and the share of results that are the likeliest token."""
    target = tokens[:, 1:]
    is_result = (tokens[:, :-1] == ids.equals) | (target == ids.hit) | (target == ids.miss)
    weights = weights[:, 1:] * jnp.where(is_result, RESULT_WEIGHT, 1.0)
    hidden = forward(MODEL, params, tokens)
    logits = head(MODEL, params, hidden[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    is_counted = is_result & (weights > 0)
    is_right = (logits.argmax(-1) == target) & is_counted
    return (losses * weights).sum() / weights.sum(), is_right.sum() / is_counted.sum()


@partial(jax.jit, static_argnums=(0, 1))
def train_step(
    optimizer: optax.GradientTransformation,
    ids: ResultTokens,
    state: TrainState,
    tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[TrainState, Metrics]:
    """Makes one optimiser step; also returns the loss and the share of right results."""
    gradient = jax.value_and_grad(loss, has_aux=True)
    metrics, grads = gradient(state.params, ids, tokens, weights)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state), metrics


def save_state(file: Path, step: int, state: TrainState) -> None:
    """Writes the state of training, whole or not at all."""
    arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    partial_file = file.with_name("partial.npz")
    np.savez(partial_file, step=step, **arrays)
    os.replace(partial_file, file)


def restore_state(file: Path, state: TrainState) -> tuple[int, TrainState]:
    """Returns the step and the state that `save_state` wrote; 0 and `state` where there is no file."""
    if not file.exists():
        return 0, state
    leaves, tree = jax.tree.flatten(state)
    with np.load(file) as saved:
        step = int(saved["step"])
        leaves = [jnp.asarray(saved[f"x{i}"]) for i in range(len(leaves))]
    return step, jax.tree.unflatten(tree, leaves)


def train(step: int, state: TrainState, batches: Iterator[TokenRows], update: Update, file: Path) -> TrainState:
    """Trains up to --steps, logs the means since the last line, and saves the state."""
    clock = time.time()
    num_seen = 0
    sums = np.zeros(2)
    while step < FLAGS.steps:
        state, metrics = update(state, *next(batches))
        step += 1
        num_seen += 1
        sums += [float(metric) for metric in metrics]
        is_last = step == FLAGS.steps
        if step % LOG_INTERVAL == 0 or is_last:
            mean_loss, accuracy = sums / num_seen
            pace = (time.time() - clock) / num_seen
            print(f"step {step}  loss {mean_loss:.4f}  results right {accuracy:.4f}  {pace:.3f} s/step", flush=True)
            clock = time.time()
            num_seen = 0
            sums = np.zeros(2)
        if step % SAVE_INTERVAL == 0 or is_last:
            save_state(file, step, state)
    return state


def main(_):
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    optimizer = make_optimizer(FLAGS.steps)
    params = init_params(MODEL, jax.random.key(FLAGS.seed))
    state = TrainState(params, optimizer.init(params))
    file = out / "pretraining.npz"
    step, state = restore_state(file, state)
    batches = make_batches(tokenizer, Countdown(**COUNTDOWN), step)
    update = partial(train_step, optimizer, find_result_tokens(tokenizer))
    state = train(step, state, batches, update, file)
    save_model(out, MODEL, state.params, Tokenizer(tokenizer))
    file.unlink()


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("out", str(HERE / "tiny"), "folder to write")
    flags.DEFINE_integer("steps", STEPS, "optimiser steps")
    flags.DEFINE_integer("seed", 0, "of the initial parameters")
    app.run(main)
