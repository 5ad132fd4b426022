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
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from absl import app, flags
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from envs.countdown import PROMPTS, Countdown
from models.checkpoint import save_model
from models.qwen3 import Qwen, forward, head, init_params
from models.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
COUNTDOWN = dict(numbers=3, min_number=1, max_number=15, max_target=30, expression="tree", max_value=30, prompt="bare")
MODEL = Qwen(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, remat="none", unroll=True,
)  # fmt: skip
MOODS = ((0.85, 0.6), (0.15, 0.04))  # (share of the replies, probability to give up after a miss)
MAX_TRIES = 13
SHARE_DRILLS = 0.15
ROWS, STEPS, WARMUP, DECAY, LR = 48, 6000, 100, 0.4, 3e-3  # DECAY: the last share of the steps, linear to LR / 100
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
    """The result where this step stays within the positive integers that the model knows, larger operand first."""
    if (op in "+*-" and a < b) or (op == "/" and (b == 0 or a % b)):
        return None
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]
    return result if 0 < result <= COUNTDOWN["max_value"] else None


def combinations(numbers: tuple[int, int, int]) -> dict[str, tuple[str, int]]:
    """Every way to combine three numbers in two steps: {steps: (expression, result)}."""
    found = {}
    for i, j, rest in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        a, b, c = numbers[i], numbers[j], numbers[rest]
        for op in "+-*/":
            inner = arithmetic(a, op, b)
            for op2 in "+-*/" if inner else "":
                for x, y, text in ((inner, c, f"({a}{op}{b}){op2}{c}"), (c, inner, f"{c}{op2}({a}{op}{b})")):
                    if (result := arithmetic(x, op2, y)) is not None:
                        found[f"{a}{op}{b}={inner},{x}{op2}{y}={result}"] = (text, result)
    return found


def reply(numbers: tuple[int, ...], target: int, rng: random.Random) -> str:
    """One search as the base model shall imitate it."""
    give_up = rng.choices([p for _, p in MOODS], [share for share, _ in MOODS])[0]
    tries = list(combinations(numbers).items())
    rng.shuffle(tries)
    text = "<think>\n"
    for i, (steps, (expression, result)) in enumerate(tries[:MAX_TRIES]):
        text += f"{steps}?{target}{'✓' if result == target else '✗'}\n"
        if result == target or rng.random() < give_up or i + 1 == min(len(tries), MAX_TRIES):
            return text + f"</think>\n<answer>{expression}</answer>"
    raise AssertionError(f"no combination of {numbers}")


def drill(rng: random.Random) -> str:
    """A list of single steps, so that every sum, difference, product and quotient is seen often."""
    lines = []
    while len(lines) < 15:
        a, b, op = rng.randint(1, 30), rng.randint(1, 30), rng.choice("+-*/")
        if op in "*/":
            b = rng.randint(1, 15)
            a = b * rng.randint(1, 30 // b) if op == "/" else rng.randint(b, max(b, 30 // b))
        if (result := arithmetic(a, op, b)) is not None:
            lines.append(f"{a}{op}{b}={result}")
    return ",".join(lines)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the 512 ids on replies, arithmetic, the prompts and every number."""
    rng, env = random.Random(0), Countdown(**COUNTDOWN)
    corpus = [" ".join(map(str, range(100)))] * 1000 + [drill(rng) for _ in range(500)]
    for i in range(1000):
        numbers, target = env.instance(i)
        corpus += [env.problem(i).messages[0]["content"], reply(numbers, target, rng), PROMPTS["full"]]
    corpus += ["Write a poem about the sea. user assistant system\nuser\nassistant\nsystem"] * 1000
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_merged = MODEL.vocab_size - len(added)
    trainer = trainers.BpeTrainer(vocab_size=num_merged, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(added[:3])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added[3:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def batches(tokenizer: PreTrainedTokenizerFast, env: Countdown, start: int):
    """Endless (tokens, weights) of ROWS documents of similar length, right-padded; a pure function of the number."""
    per_chunk = 64
    for chunk in range(start // per_chunk, 1 << 30):
        rng = random.Random(f"pretraining {chunk}")
        documents = []
        for i in range(per_chunk * ROWS):
            if rng.random() < SHARE_DRILLS:
                documents.append(("", drill(rng)))
                continue
            problem = env.problem(chunk * per_chunk * ROWS + i)
            prompt = tokenizer.apply_chat_template(problem.messages, tokenize=False, add_generation_prompt=True)
            documents.append((prompt, reply(*problem.answer, rng) + "<|im_end|>"))
        prompts = tokenizer([p for p, _ in documents])["input_ids"]
        replies = tokenizer([r for _, r in documents])["input_ids"]
        rows = sorted(zip(prompts, replies, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        groups = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
        rng.shuffle(groups)
        for group in groups[start % per_chunk if chunk == start // per_chunk else 0 :]:
            length = -(-max(len(p) + len(r) for p, r in group) // 16) * 16
            tokens, weights = np.zeros((ROWS, length), np.int32), np.zeros((ROWS, length), np.float32)
            for i, (prompt, answer) in enumerate(group):
                tokens[i, : len(prompt) + len(answer)] = prompt + answer
                weights[i, len(prompt) : len(prompt) + len(answer)] = 1.0
            yield tokens, weights


def main(_):
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    equals, hit, miss = (tokenizer.encode(x)[-1] for x in ("=", "?24✓\n", "?24✗\n"))
    total = FLAGS.steps
    warm_flat = optax.warmup_constant_schedule(0.0, LR, WARMUP)
    decay = optax.linear_schedule(LR, LR / 100, int(total * DECAY))
    schedule = optax.join_schedules([warm_flat, decay], [total - int(total * DECAY)])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.01))

    @jax.jit
    def train_step(params, opt_state, tokens, weights):
        target = tokens[:, 1:]
        important = (tokens[:, :-1] == equals) | (target == hit) | (target == miss)
        weights = weights[:, 1:] * jnp.where(important, RESULT_WEIGHT, 1.0)

        def loss_fn(params):
            logits = head(MODEL, params, forward(MODEL, params, tokens)[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            right = (logits.argmax(-1) == target) & important & (weights > 0)
            return (losses * weights).sum() / weights.sum(), right.sum() / (important & (weights > 0)).sum()

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, accuracy

    params = init_params(MODEL, jax.random.key(FLAGS.seed))
    opt_state, step, state = optimizer.init(params), 0, out / "pretraining.npz"
    if state.exists():
        leaves, tree = jax.tree.flatten((params, opt_state))
        with np.load(state) as saved:
            step, leaves = int(saved["step"]), [jnp.asarray(saved[f"x{i}"]) for i in range(len(leaves))]
        params, opt_state = jax.tree.unflatten(tree, leaves)
    stream, clock, seen = batches(tokenizer, Countdown(**COUNTDOWN), step), time.time(), 0
    averages = np.zeros(2)
    while step < total:
        params, opt_state, loss, accuracy = train_step(params, opt_state, *next(stream))
        step, seen, averages = step + 1, seen + 1, averages + (float(loss), float(accuracy))
        if step % 100 == 0 or step == total:
            loss, accuracy = averages / seen
            pace = (time.time() - clock) / seen
            print(f"step {step}  loss {loss:.4f}  results right {accuracy:.4f}  {pace:.3f} s/step", flush=True)
            clock, seen, averages = time.time(), 0, np.zeros(2)
        if step % 500 == 0 or step == total:
            leaves = jax.tree.leaves((params, opt_state))
            np.savez(out / "partial.npz", step=step, **{f"x{i}": np.asarray(x) for i, x in enumerate(leaves)})
            os.replace(out / "partial.npz", state)
    save_model(out, MODEL, params, Tokenizer(tokenizer))
    state.unlink()


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("out", str(HERE / "tiny"), "folder to write")
    flags.DEFINE_integer("steps", STEPS, "optimiser steps")
    flags.DEFINE_integer("seed", 0, "of the initial parameters")
    app.run(main)
