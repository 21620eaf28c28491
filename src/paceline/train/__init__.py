"""Updates of weights: the policy from rewards, the draft from the policy."""
