"""PPO (arXiv 1707.06347) with a critic and generalized advantage estimation (arXiv 1506.02438).

The critic is a copy of the policy under a linear head, with its own AdamW (--critic_lr): a second training state,
16 bytes a parameter. (A head on the policy's own trunk would be nearly free, but explains next to nothing: 7% of
the reward's variance on the demo as a linear fit, against 43% for a copy.) No groups are compared, so every
completion counts. --value_clip 0.2 suits rewards from 0 to 1: raise it with the spread of returns (0: no limit).
Expect value/explained_variance to rise first, then the return.
The entropy bonus stays at its default; the paper's is 0.01 on Atari games and 0 elsewhere.
"""


def get_config():
    return {
        "advantage": "gae",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "gamma": 1.0,
        "gae_lambda": 0.95,
    }
