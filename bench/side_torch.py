"""transformers as a side of bench/peers.py: `generate`, and a plain PyTorch loop around its model.

Its best settings, as far as known: sdpa attention, logits of completion tokens only, fused AdamW, micro-batches of 8
rows (the fastest of 4, 8, 16, 64 on two cores; 16 on a GPU), no padding, so no mask. "compiled": torch.compile.
"""

import os

from bench.side import ROLLOUTS

try:
    import torch
    from transformers import AutoModelForCausalLM, CompileConfig, StoppingCriteriaList
except ImportError:  # then this side is left out
    torch = None

MICROBATCH = 8  # rows, on a CPU
MICROBATCH_ON_GPU = 16


def load(work: dict):
    """The model on the device that is there, in the type that ours is measured in."""
    if torch is None:
        raise ImportError("torch and transformers are not installed")
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(work["model_dir"], dtype=torch.bfloat16 if cuda else torch.float32)
    model.generation_config.eos_token_id = None  # completions end where the work says
    return model.to("cuda" if cuda else "cpu").eval()


def rollout(model, work: dict, variant: str) -> int:
    """Samples completions of these lengths, on a CPU `batch_rows` at a time; returns useful tokens."""
    rows = torch.tensor(work["prompts"], device=model.device).repeat_interleave(work["group_size"], 0)
    lengths, width = torch.tensor(work["lengths"], device=model.device), rows.shape[1]
    size = len(rows) if rows.is_cuda else work["batch_rows"]
    for part, ends in zip(rows.split(size), lengths.split(size), strict=True):
        settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
        settings |= dict(max_new_tokens=work["limit"], attention_mask=torch.ones_like(part))
        if variant != "dynamic":
            settings |= dict(cache_implementation="static", disable_compile=variant == "static")
        if variant == "compiled":
            settings["compile_config"] = CompileConfig(fullgraph=False, mode="default")
            settings["compile_config"]._compile_all_devices = True
        if len(set(work["lengths"])) > 1:
            # Ends each row at its number of new tokens, as a stop token drawn there would.
            is_done = lambda ids, scores, ends=ends, **_: ids.shape[1] - width >= ends  # noqa: E731
            settings["stopping_criteria"] = StoppingCriteriaList([is_done])
        out = model.generate(part, **settings)
        assert out.shape == (len(part), width + int(ends.max())), out.shape
    return int(lengths.sum())


def logprobs(model, rows, num_completion_tokens: int):
    """Log-probabilities [B, A] of the completions."""
    logits = model(rows, logits_to_keep=num_completion_tokens + 1, use_cache=False).logits[:, :-1]
    targets = rows[:, -num_completion_tokens:]
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)


def update(model, optimizer, work: dict, rows, advantages, forward) -> int:
    """Old log-probabilities (with `old`), then one step on the clipped objective; returns trained tokens."""
    size = MICROBATCH_ON_GPU if rows.is_cuda else MICROBATCH
    width, parts = work["limit"], list(zip(rows.split(size), advantages.split(size), strict=True))
    if work["old"]:
        with torch.no_grad():
            old = [forward(model, part, width) for part, _ in parts]
    for i, (part, advantage) in enumerate(parts):
        new = forward(model, part, width)
        ratio = (new - (old[i] if work["old"] else new.detach())).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-surrogate.sum() / (rows.shape[0] * width)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return rows.shape[0] * width


def run(work: dict, variant: str, gate) -> None:
    """One of the works, again and again."""
    model, tokens = load(work), 0
    if work["name"] in ROLLOUTS:
        with torch.no_grad():
            while gate(tokens):
                tokens = rollout(model, work, variant)
    model.train()
    rows = torch.tensor(work["rows"], device=model.device)
    advantages = torch.linspace(-1, 1, len(rows), device=model.device)[:, None]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, (0.9, 0.95), 1e-8, 0.01, fused=True)
    forward = torch.compile(logprobs) if variant == "compiled" else logprobs
    while gate(tokens):
        tokens = update(model, optimizer, work, rows, advantages, forward)
