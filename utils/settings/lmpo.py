"""kvfrans/lmpo's flags that have another name here, so that its commands work: `parse(..., spellings=LMPO)`."""

from utils.settings.arguments import Rewrite, Spellings

REWRITES = {  # lmpo's flag: (our option, its value for 1, its value for 0)
    "do_group_normalization": Rewrite("advantage", "group_zscore", "reinforce"),
    "do_ppo_all_clip": Rewrite("objective", "ppo_all_clip", "ppo"),
    "do_save_rollouts": Rewrite("save_rollouts", "all", "none"),
    "use_remat": Rewrite("remat", "full", "none"),
}
REFUSED = {  # flags that did nothing in lmpo, or would do something else here
    "prefill_batch_split": "each prompt is prefilled once",
    "use_flash_attn": "attention is chosen by platform",
    "use_xla_flags": "set XLA_FLAGS in the environment",
    "save_rollouts_dir": "rollouts are written to <save_dir>/rollouts",
}
LMPO = Spellings("lmpo", REWRITES, REFUSED)
