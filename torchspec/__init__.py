"""RL post-training whose rollouts stay fast because the draft models learn with the policy."""
