"""Pre-trains small models on generated documents: what make_tiny.py and make_player.py share."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
import tokenizers
from jaxtyping import Float, Int, PyTree
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from models.architecture import Decoder
from models.checkpoint import save_model
from models.decoder import forward, head, init_params
from models.names import Array, Params
from models.tokenizer import Tokenizer

MODEL = Decoder(
    vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, remat="none", unroll=True,
)  # fmt: skip
ROWS = 48
BATCHES_PER_CHUNK = 64  # that are sorted by length together
WARMUP = 100
DECAY = 0.4  # the last share of the steps, linear to LR / 100
LR = 3e-3
MATRIX_LR = 0.02  # with Muon
WEIGHT_DECAY = 0.01
LOG_INTERVAL = 100

SPLIT = (  # Qwen2's pattern, with up to two digits in a token
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tokenizer(
    corpus: Sequence[str], tags: Sequence[str], template: str, pattern: str = SPLIT
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of as many ids as MODEL has; tags are tokens that count as text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_merged = MODEL.vocab_size - len(SPECIAL) - len(tags)
    trainer = trainers.BpeTrainer(vocab_size=num_merged, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


class Document(NamedTuple):
    """Tokens, and the weight of the loss on each."""

    ids: list[int]
    weights: list[float]


WriteDocuments = Callable[[range, random.Random], list[Document]]  # with these numbers
TokenRows = tuple[Int[np.ndarray, "B T"], Float[np.ndarray, "B T"]]  # tokens, weights of the loss


def make_chunk(write: WriteDocuments, chunk: int) -> list[list[Document]]:
    """Returns BATCHES_PER_CHUNK batches of documents of similar length, in random order."""
    rng = random.Random(f"pretraining {chunk}")
    size = BATCHES_PER_CHUNK * ROWS
    documents = write(range(chunk * size, (chunk + 1) * size), rng)
    documents = sorted(documents, key=lambda document: len(document.ids))
    batches = [documents[i : i + ROWS] for i in range(0, len(documents), ROWS)]
    rng.shuffle(batches)
    return batches


def pad_documents(documents: list[Document]) -> TokenRows:
    """Returns right-padded tokens and weights."""
    longest = max(len(document.ids) for document in documents)
    length = -(-longest // 16) * 16
    tokens = np.zeros((ROWS, length), np.int32)
    weights = np.zeros((ROWS, length), np.float32)
    for i, document in enumerate(documents):
        tokens[i, : len(document.ids)] = document.ids
        weights[i, : len(document.ids)] = document.weights
    return tokens, weights


def make_batches(write: WriteDocuments) -> Iterator[TokenRows]:
    """Yields batches without end; each is a pure function of its number."""
    for chunk in count():
        yield from map(pad_documents, make_chunk(write, chunk))


class TrainState(NamedTuple):
    """Parameters and optimizer state."""

    params: Params
    opt_state: optax.OptState


Metrics = tuple[Float[Array, ""], Float[Array, ""]]  # loss in nats, share of key tokens that are the likeliest


def learning_rate(peak: float, num_steps: int) -> optax.Schedule:
    """Returns a learning rate that rises, stays, and decays to a hundredth."""
    num_decay = int(num_steps * DECAY)
    constant = optax.warmup_constant_schedule(0.0, peak, WARMUP)
    decay = optax.linear_schedule(peak, peak / 100, num_decay)
    return optax.join_schedules([constant, decay], [num_steps - num_decay])


def make_adamw(num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW for all parameters."""
    adamw = optax.adamw(learning_rate(LR, num_steps), b1=0.9, b2=0.95, weight_decay=WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_muon(num_steps: int) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers, and Adam for the other parameters."""
    muon = optax.contrib.muon(
        learning_rate(MATRIX_LR, num_steps),
        weight_decay=WEIGHT_DECAY,
        adam_b2=0.95,
        adam_learning_rate=learning_rate(LR, num_steps),
        muon_weight_dimension_numbers=matrix_axes,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def matrix_axes(params: Params) -> PyTree:
    """Returns the axes of parameters that are a matrix in each layer, [layers, out, in]; None for others."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    return jax.tree.map(lambda x: axes if x.ndim == 3 else None, params)


def loss(params: Params, tokens: Int[Array, "B T"], weights: Float[Array, "B T"]) -> Metrics:
    """Returns the weighted cross-entropy, nats, and the share of tokens with weights above 1 that are the likeliest."""
    target, weights = tokens[:, 1:], weights[:, 1:]
    hidden = forward(MODEL, params, tokens)
    logits = head(MODEL, params, hidden[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    is_key = weights > 1
    is_right = (logits.argmax(-1) == target) & is_key
    return (losses * weights).sum() / weights.sum(), is_right.sum() / is_key.sum()


@partial(jax.jit, static_argnums=0)
def train_step(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[TrainState, Metrics]:
    """Makes one optimizer step; also returns the loss and the share of right key tokens."""
    gradient = jax.value_and_grad(loss, has_aux=True)
    metrics, grads = gradient(state.params, tokens, weights)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state), metrics


def pretrain(
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    write: WriteDocuments,
    num_steps: int,
    seed: int,
    optimizer: optax.GradientTransformation,
) -> None:
    """Writes the folder of a model that has seen `num_steps` batches of documents, and logs means of its metrics."""
    params = init_params(MODEL, jax.random.key(seed))
    state = TrainState(params, optimizer.init(params))
    clock, recent = time.time(), []
    for step, batch in zip(range(1, num_steps + 1), make_batches(write), strict=False):
        state, metrics = train_step(optimizer, state, *batch)
        recent.append([float(metric) for metric in metrics])
        if step % LOG_INTERVAL == 0 or step == num_steps:
            mean_loss, accuracy = np.mean(recent, axis=0)
            pace = (time.time() - clock) / len(recent)
            print(f"step {step}  loss {mean_loss:.4f}  key tokens right {accuracy:.4f}  {pace:.3f} s/step", flush=True)
            clock, recent = time.time(), []
    save_model(out, MODEL, state.params, Tokenizer(tokenizer))
