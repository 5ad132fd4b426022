"""Runs the commands of README.md, docs/ and recipes/, each page in a copy of what git would clone: `make readme`.

    python tests/readme.py [PAGE...]    # README.md, docs/runs.md, ...; none: all, README.md first

Each block of commands is one bash script, in the order of the page; inline commands that begin with `python` come last.
A ```diff is applied, in place of the page's one before; a ```python whose first line is a comment with a file name is
written there, any other is executed. The pages share a home folder. Commands stay as they are printed; what makes them
cheap are the programs that they find: `python` adds the flags in `CUT`, and the downloads are local. Commands that
cannot run here are in `NOT_RUN`, are listed with the reason, and are counted. Exit status 1: a command failed, or
README.md has none.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
DATA = ROOT / "tests" / "fixtures" / "data"
SHORT = ["--num_generation_tokens", "64", "--prompt_length", "2048"]  # tiny's tokens are small: prompts are long
EVAL = [*SHORT, "--num_eval_tasks", "4", "--num_eval_samples", "2"]
TRAIN = [*EVAL, "--max_steps", "1", "--groups_per_batch", "2", "--group_size", "4", "--ppo_minibatch", "0"]
TRAIN += ["--inference_batch_per_device", "8", "--tokens_per_microbatch", "0", "--max_resampling", "1"]
CUT = {  # program: the flags that come last, and so win
    "core/sft.py": [*EVAL, "--max_steps", "1", "--batch_size", "2"],
    "recipes/preferences/dpo.py": [*EVAL, "--max_steps", "1", "--batch_size", "2"],
    "core/grpo.py": TRAIN,
    "recipes/offline/train.py": TRAIN,
    "extras/population.py": TRAIN,
    "core/eval.py": EVAL,
    "core/sampling.py": ["--num_generation_tokens", "16"],
}
STEPS = ("step20", "step24", "step40", "step60")  # models that the pages name; here they are what the cut run has saved
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = {  # pattern of a command: why it is not run
    r"(python -m )?pip (install|download)|uv ": "installs from the network, or for hardware that is not here",
    r"unzip |python runs/gguf_to_hf\.py": "needs a file that was downloaded",
    r"pre-commit": "needs the network",
    r"git clone|cd ": "this is a fresh clone, and its folder",
    r"make (test|readme)": "is run beside this; it would run itself",
    r"(bash )?(runs/(slurm|tpu_pod)\.sh|sbatch|srun|gcloud|kubectl|sky)|.*gcloud ": "needs a cluster",
    r"python bench/": "a measurement of minutes to an hour, or of peers that are not installed",
    r".*configs/one_chip\.py": "refuses a CPU",
    r".*(core/serve|recipes/agents/serve|extras/chat_web)\.py |curl ": "serves until Ctrl-C, or asks a server",
    r"((TASK|GSM8K_DIR)=\S+ )?bash runs/(coder|sft)\.sh": "needs GSM8K, and up to an hour",
    r"vllm |.*\bvllm serve": "needs vLLM and a GPU",
    r"(wandb|huggingface-cli|hf) ": "needs an account",
    r"python (recipes/agents/verifiers|core/grpo\.py --config recipes/agents/preset)": "needs verifiers",
    r"python - <<'END_OF_BLOCK'\nimport gymnasium": "needs gymnasium",
}


def clone(folder: Path) -> None:
    """Copies what git would clone, changes that are not committed included."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def commands(block: str) -> list[str]:
    """Returns the commands of a bash script: lines, with what a backslash or a here-document joins to them."""
    found, lines = [], iter(block.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\"):
            command += "\n" + next(lines)
        if here := re.search(r"<<-?\s*'?(\w+)'?", command):
            while command.splitlines()[-1].strip() != here[1]:
                command += "\n" + next(lines)
        if command.strip() and not command.lstrip().startswith("#"):
            found.append(command.strip())
    return found


def reason(command: str) -> str | None:
    """Returns the reason why a command is not run, None if it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def programs(folder: Path) -> Path:
    """Makes a folder with the `python` that the commands find."""
    folder.mkdir()
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__, "--as-python"])} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def as_python(argv: list[str]) -> int:
    """Runs a program of the clone, in short."""
    program, flags = argv[0], argv[1:]
    if program == "models/download_model.py":
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        target = Path(given["--dest_root_path"]).expanduser() / given["--model_id"].rsplit("/", 1)[-1]
        shutil.copytree(TINY, target, dirs_exist_ok=True)
        return 0
    if program == "runs/real_model.py":
        shutil.copytree(TINY, Path.home() / "checkpoints" / flags[0], dirs_exist_ok=True)
        return 0
    is_short = "--help" in flags or "JAX_DISABLE_JIT" in os.environ  # as printed: longer ones would take minutes
    if program in CUT and not is_short:
        short = list(CUT[program])
        if re.search("gsm8k|deepscaler|aime|amc|math500|countdown34", " ".join(flags)) and "--data_dir" not in flags:
            short += ["--data_dir", str(DATA)]
        if re.search("recipes/(games|agents)", " ".join(flags)):  # models/player: short prompts, and few positions
            short = short[len(SHORT) :]
        flags += short if flags else ["--config", "configs/demo.py", *short]
    if program == "extras/compare.py":  # runs that the page only names
        made = next(Path("runs").glob("*/metrics.jsonl"), Path("runs/none")).parent
        for name in (name for name in flags if re.fullmatch(r"(runs|~/runs)/\w+", name) and not Path(name).exists()):
            shutil.copytree(made, name)
    status = subprocess.run([sys.executable, program, *flags]).returncode
    if program == "core/grpo.py" and "--save_dir" in flags and not status:
        run = Path(flags[flags.index("--save_dir") + 1]).expanduser()
        saved = sorted(run.glob("step[0-9]*"))[-1:]
        for source, name in ((source, name) for source in saved for name in STEPS if not (run / name).exists()):
            shutil.copytree(source, run / name)
    return status


def run(name: str, block: str, folder: Path, env: dict[str, str], skipped: list[tuple[str, str]]) -> tuple[int, str]:
    """Runs a block; returns how many of its commands ran, and what to say if one failed."""
    script, todo = ["set -eo pipefail"], []
    for command in commands(block):
        if why := reason(command):
            skipped.append((command, why))
            continue
        script.append(f"echo {len(todo)} > {shlex.quote(env['PROGRESS'])}\n{command}")
        todo.append(command)
    if not todo:
        return 0, ""
    clock = time.perf_counter()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=folder, env=env, text=True, **pipes)
    print(f"{'ok' if not done.returncode else 'FAILED':<7}{time.perf_counter() - clock:5.0f} s  {name}", flush=True)
    for command in todo:
        print(f"                {command.splitlines()[0]}", flush=True)
    if not done.returncode:
        return len(todo), ""
    failed = todo[int(Path(env["PROGRESS"]).read_text())]
    return len(todo), f"{name}, exit status {done.returncode}:\n{failed}\n{done.stdout[-3000:]}"


def prepare(folder: Path, bin_dir: Path) -> None:
    """Makes the clone that a page runs in, with what `make demo` would install and hub models as local folders."""
    folder.mkdir(parents=True)
    clone(folder)
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B"):  # a hub id is first looked for as a folder
        shutil.copytree(TINY, folder / "Qwen" / name)
    venv = folder / ".venv"
    (venv / "bin").mkdir(parents=True)
    shutil.copy2(bin_dir / "python", venv / "bin" / "python")
    for stamp in ("installed", "installed-test", "bin/activate"):
        (venv / stamp).touch()


def environment(scratch: Path, bin_dir: Path) -> dict[str, str]:
    """Returns the environment variables of the commands."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "WANDB", "MFLAGS"))}
    return env | {
        "PATH": f"{bin_dir}{os.pathsep}{env['PATH']}",
        "HOME": str(scratch / "home"),
        "HF_HUB_OFFLINE": "1",
        "PROGRESS": str(scratch / "progress"),
        "WANDB_MODE": "offline",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def blocks(page: str, text: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the place and the script of each block of a page, then its inline commands; applies the rest."""
    applied = ""
    for match in BLOCK.finditer(text):
        language, block = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if language == "diff":
            for options, diff in ((["-R"], applied), ([], block)):
                if diff:
                    subprocess.run(["git", "apply", *options], cwd=folder, input=diff, text=True, check=True)
            applied = block
        elif language == "python" and (file := re.match(r"# ([\w/]+\.py)\n", block)):
            (folder / file[1]).write_text(block)
        elif language == "python":
            yield f"{page}:{line}", f"python - <<'END_OF_BLOCK'\n{block}END_OF_BLOCK"
        elif language in ("bash", "sh"):
            yield f"{page}:{line}", block
    inline = re.findall(r"`((?:python3?|bash)\s[^`]+)`", BLOCK.sub("", text))
    for command in dict.fromkeys(inline):
        yield f"{page}, inline", " ".join(command.split())


def main(pages: list[str]) -> int:
    counts = Counter()
    failures = []
    skipped = []
    with tempfile.TemporaryDirectory(prefix="readme ") as name:  # with a space: paths must be quoted
        scratch = Path(name)
        (scratch / "home").mkdir()
        bin_dir = programs(scratch / "bin")
        env = environment(scratch, bin_dir)
        for page in pages:
            folder = scratch / page / "lmpo"
            prepare(folder, bin_dir)
            for place, script in blocks(page, (folder / page).read_text(encoding="utf-8"), folder):
                num_run, failure = run(place, script, folder, env, skipped)
                counts[page] += num_run
                failures += [failure] * bool(failure)
    print(f"\n{counts.total()} commands ran, {len(failures)} blocks failed; {len(skipped)} commands were not run:")
    for command, why in skipped:
        print(f"  {command.splitlines()[0][:70]:<72}{why}")
    print(*failures, sep=f"\n{'-' * 100}\n")
    return int(bool(failures) or not counts[pages[0]])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-python"]:
        sys.exit(as_python(sys.argv[2:]))
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*/README.md")]
    docs = sorted(path.relative_to(ROOT).as_posix() for path in files)
    sys.exit(main(sys.argv[1:] or ["README.md", *docs]))
