"""Runs what README.md tells people to run, in a copy of what git would clone: `make readme`.

Each block of commands is one bash script, in the order of the page; inline commands that begin with `python` come last.
A ```diff whose first line is a file is applied to it; a ```python whose first line is a comment with a file name is
written there, any other is executed. Commands stay as they are printed; what makes them cheap are the programs they
find: `python` adds the flags in `CUT`, and the downloads are local. What cannot run here is in `NOT_RUN`, is listed
with its reason, and is counted. Exit status 1: a command failed, or the page has none.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
DATA = ROOT / "tests" / "fixtures" / "data"
SHORT = ["--num_generation_tokens", "16", "--prompt_length", "2048"]  # tiny's tokens are small: prompts are long
EVAL = [*SHORT, "--num_eval_tasks", "4", "--num_eval_samples", "2"]
CUT = {  # program: the flags that come last, and so win
    "core/grpo.py": [
        *EVAL, "--max_steps", "1", "--groups_per_batch", "2", "--group_size", "4", "--ppo_minibatch", "0",
        "--inference_batch_per_device", "8", "--tokens_per_microbatch", "0", "--max_resampling", "1",
    ],
    "core/eval.py": EVAL,
    "core/sampling.py": ["--num_generation_tokens", "16"],
}  # fmt: skip
STEPS = ("step20", "step40", "step60")  # models that the page speaks of; here they are what the cut run has saved
NOT_RUN = {  # pattern of a command: why it is not run
    r"(python -m )?pip install": "installs from the network, or for hardware that is not here",
    r"pre-commit": "needs the network",
    r"git clone|cd ": "this is a fresh clone, and its folder",
    r"make (test|readme)": "is run beside this; it would run itself",
    r"(bash )?(runs/(slurm|tpu_pod)\.sh|sbatch|srun|gcloud)|.*gcloud ": "needs a cluster",
    r"python bench/": "a measurement of minutes to an hour, or of peers that are not installed",
    r"vllm |.*\bvllm serve": "needs vLLM and a GPU",
    r"(wandb|huggingface-cli|hf) ": "needs an account",
}


def clone(folder: Path) -> None:
    """What git would clone, changes that are not committed included."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def commands(block: str) -> list[str]:
    """The commands of a bash script: lines, with what a backslash or a here-document joins to them."""
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
    """Why a command is not run, None if it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def apply(diff: str, folder: Path) -> None:
    """Replaces the context and the "-" lines of a diff without line numbers by the context and the "+" lines."""
    name, *lines = diff.rstrip("\n").splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line[:1] in f" {sign}") for sign in "-+")
    file = folder / name.strip()
    text = file.read_text()
    assert text.count(old) == 1, f"the diff of {name.strip()} does not apply: its old lines must be there, once"
    file.write_text(text.replace(old, new))


def programs(folder: Path) -> Path:
    """A folder with the `python` that the commands find."""
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
    if program in CUT and "--help" not in flags:
        short = list(CUT[program])
        if re.search("gsm8k|deepscaler|aime|amc|math500|countdown34", " ".join(flags)) and "--data_dir" not in flags:
            short += ["--data_dir", str(DATA)]
        flags += short if flags else ["--config", "configs/demo.py", *short]
    if program == "utils/reporting/page.py":  # runs that the page only names
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
    clock, pipe = time.perf_counter(), subprocess.PIPE
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=pipe,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    print(f"{'ok' if not done.returncode else 'FAILED':<7}{time.perf_counter() - clock:5.0f} s  {name}", flush=True)
    for command in todo:
        print(f"                {command.splitlines()[0]}", flush=True)
    if not done.returncode:
        return len(todo), ""
    failed = todo[int(Path(env["PROGRESS"]).read_text())]
    return len(todo), f"{name}, exit status {done.returncode}:\n{failed}\n{done.stdout[-3000:]}"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="readme ") as scratch:  # with a space: paths must be quoted
        scratch = Path(scratch)
        folder, home = scratch / "lmpo", scratch / "home"
        folder.mkdir(), home.mkdir()
        clone(folder)
        shutil.copytree(TINY, folder / "Qwen" / "Qwen3-1.7B")  # a hub id is first looked for as a folder
        for name in ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B"):
            shutil.copytree(TINY, folder / "Qwen" / name)
        venv = folder / ".venv"  # what `make demo` would install
        programs(scratch / "bin")
        (venv / "bin").mkdir(parents=True)
        shutil.copy2(scratch / "bin" / "python", venv / "bin" / "python")
        for stamp in ("installed", "installed-test"):
            (venv / stamp).touch()
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "WANDB", "MFLAGS"))}
        env |= {
            "PATH": f"{scratch / 'bin'}{os.pathsep}{env['PATH']}", "HOME": str(home), "HF_HUB_OFFLINE": "1",
            "PROGRESS": str(scratch / "progress"), "WANDB_MODE": "offline", "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }  # fmt: skip
        page = (folder / "README.md").read_text(encoding="utf-8")
        count, failures, skipped = 0, [], []
        for place in re.finditer(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            language, block = place.groups()
            name = f"README.md:{page[: place.start()].count(chr(10)) + 1}"
            if language == "diff":
                apply(block, folder)
            elif language == "python" and (file := re.match(r"# ([\w/]+\.py)\n", block)):
                (folder / file[1]).write_text(block)
                continue
            elif language == "python":
                block = f"python - <<'END_OF_BLOCK'\n{block}END_OF_BLOCK"
            if language in ("bash", "sh", "python"):
                ran, failure = run(name, block, folder, env, skipped)
                count, failures = count + ran, failures + [failure] * bool(failure)
        rest = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
        for command in dict.fromkeys(re.findall(r"`((?:python3?|bash) [^`]+)`", rest)):
            command = " ".join(command.split())
            ran, failure = run("inline", command, folder, env, skipped)
            count, failures = count + ran, failures + [failure] * bool(failure)
    print(f"\n{count} commands ran, {len(failures)} blocks failed; {len(skipped)} commands were not run:")
    for command, why in skipped:
        print(f"  {command.splitlines()[0][:70]:<72}{why}")
    print(*failures, sep=f"\n{'-' * 100}\n")
    return int(bool(failures) or not count)


if __name__ == "__main__":
    sys.exit(as_python(sys.argv[2:]) if sys.argv[1:2] == ["--as-python"] else main())
