"""kvfrans/lmpo's flags that have another name here, so that its commands work: `parse(..., spellings=LMPO)`."""

from collections.abc import Iterable, Mapping

from utils.settings.arguments import Assignment, Value
from utils.settings.errors import UserError

Spelling = tuple[str, str, str]  # of a flag of another program: our option, with its value for 1 and for 0
LMPO: Mapping[str, Spelling] = {
    "do_group_normalization": ("advantage", "group_zscore", "reinforce"),
    "do_ppo_all_clip": ("objective", "ppo_all_clip", "ppo"),
    "do_save_rollouts": ("save_rollouts", "all", "none"),
    "use_remat": ("remat", "full", "none"),
}


def rewrite(
    assignments: Iterable[Assignment],
    spellings: Mapping[str, Spelling],
    options: Mapping[str, Value],
    defaults: Mapping[str, Value],
) -> dict[str, Value]:
    """Returns the options that another program's flags set.

    assignments: those of `spellings`: later ones win, and empty ones are ignored, as in config.json of old
    runs; options: what is set besides. Raises: UserError when a flag is neither 0 nor 1, or contradicts an option that
    is set to anything but its default.
    """
    by_flag = {assignment.name: assignment for assignment in assignments if assignment.value != ""}
    rewritten = {}
    for flag, assignment in by_flag.items():
        option, on, off = spellings[flag]
        switch = str(assignment.value)
        if switch not in ("0", "1"):
            raise UserError(f"{assignment.source}: {flag} must be one of 0, 1")
        value = on if switch == "1" else off
        current = options.get(option, defaults[option])
        if current not in (defaults[option], value):
            raise UserError(f"--{flag} {switch} contradicts --{option} {current}: leave one of them out")
        rewritten[option] = value
    return rewritten
