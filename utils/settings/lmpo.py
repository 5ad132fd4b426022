"""kvfrans/lmpo's flags that have another name here, so that its commands work: `parse(..., spellings=LMPO)`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from utils.settings.arguments import Assignment, Value
from utils.settings.errors import UserError


@dataclass(frozen=True)
class Spellings:
    """Flags of another program: by name, the option that each is rewritten to, or the reason why it is refused."""

    program: str = ""
    rewrites: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)  # option, its value for 1 and for 0
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.rewrites, *self.refused}


REWRITES = {  # lmpo's flag: (our option, its value for 1, its value for 0)
    "do_group_normalization": ("advantage", "group_zscore", "reinforce"),
    "do_ppo_all_clip": ("objective", "ppo_all_clip", "ppo"),
    "do_save_rollouts": ("save_rollouts", "all", "none"),
    "use_remat": ("remat", "full", "none"),
}
REFUSED = {  # flags that did nothing in lmpo, or would do something else here
    "prefill_batch_split": "each prompt is prefilled once",
    "use_flash_attn": "attention is chosen by platform",
    "use_xla_flags": "set XLA_FLAGS in the environment",
    "save_rollouts_dir": "rollouts are written to <save_dir>/rollouts",
}
LMPO = Spellings("kvfrans/lmpo", REWRITES, REFUSED)
NO_SPELLINGS = Spellings()


def rewrite(
    assignments: Iterable[Assignment], spellings: Spellings, options: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Value]:
    """Returns the options that another program's flags set.

    assignments: those of `spellings`: later ones win, and empty ones are ignored, as in config.json of old
    runs; options: what is set besides. Raises: UserError when a flag is refused, is neither 0 nor 1, or contradicts an
    option that is set to anything but its default.
    """
    by_flag = {assignment.name: assignment for assignment in assignments if assignment.value != ""}
    for flag, reason in spellings.refused.items():
        if flag in by_flag:
            raise UserError(f"--{flag} has no effect: {reason}; leave it out")
    rewritten = {}
    for flag, (option, on, off) in spellings.rewrites.items():
        if flag not in by_flag:
            continue
        switch = str(by_flag[flag].value)
        if switch not in ("0", "1"):
            raise UserError(f"{by_flag[flag].source}: {flag} must be one of 0, 1.")
        value = on if switch == "1" else off
        current = options.get(option, defaults[option])
        if current not in (defaults[option], value):
            raise UserError(f"--{flag} {switch} contradicts --{option} {current}: leave one of them out")
        rewritten[option] = value
    return rewritten
