"""kvfrans/lmpo's spellings of settings that have another name here, so that its commands keep working."""

from dataclasses import dataclass, fields

from utils.settings.config import option
from utils.settings.errors import UserError

SWITCHES = {  # lmpo's flag: (our setting, its value for 1, its value for 0)
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


@dataclass(frozen=True)
class LmpoConfig:
    """lmpo's spellings."""

    do_group_normalization: str = option("", "1: --advantage group_zscore, 0: --advantage reinforce", ["", "0", "1"])
    do_ppo_all_clip: str = option("", "1: --objective ppo_all_clip, 0: ppo", ["", "0", "1"])
    do_save_rollouts: str = option("", "1: --save_rollouts all, 0: none", ["", "0", "1"])
    use_remat: str = option("", "1: --remat full, 0: none", ["", "0", "1"])
    prefill_batch_split: str = option("", "refused: did nothing")
    use_flash_attn: str = option("", "refused: did nothing")
    use_xla_flags: str = option("", "refused: did nothing")
    save_rollouts_dir: str = option("", "refused: see --save_dir")

    def __post_init__(self):
        """Carries lmpo's spellings over to the settings that they name."""
        for name, reason in REFUSED.items():
            if getattr(self, name):
                raise UserError(f"--{name} has no effect: {reason}; leave it out")
        defaults = {field.name: field.default for field in fields(self)}
        for name, (target, on, off) in SWITCHES.items():
            if switch := getattr(self, name):
                value = on if switch == "1" else off
                if getattr(self, target) not in (defaults[target], value):
                    raise UserError(
                        f"--{name} {switch} contradicts --{target} {getattr(self, target)}: leave one of them out"
                    )
                object.__setattr__(self, target, value)  # the dataclass is frozen for everyone else
