"""From rewards to a loss: advantages and the clipped objective."""
