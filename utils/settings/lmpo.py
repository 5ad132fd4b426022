"""kvfrans/lmpo's flags that have another name here, so that its commands work: `parse(..., spellings=LMPO)`."""

from collections.abc import Mapping

from utils.settings.arguments import Value

Spelling = tuple[str, Value, Value | None]  # our option, with its value for 1 and for 0; None: the flag changes nothing
LMPO: Mapping[str, Spelling] = {
    "do_clip_advantages": ("negative_advantage_multiplier", 0.0, None),
    "do_group_normalization": ("advantage", "group_zscore", "reinforce"),
    "do_ppo_all_clip": ("objective", "ppo_all_clip", "ppo"),
    "do_save_rollouts": ("save_rollouts", "all", "none"),
    "use_remat": ("remat", "full", "none"),
}
