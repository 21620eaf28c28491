"""paceline speculates during RL rollouts without changing what is learned.

The short way in: `paceline train RECIPE.toml` on the command line, `paceline.config.load.load_recipe` and
`paceline.loop.loop.TrainingRun` from Python. Importing this package loads neither torch nor an engine.
"""

from __future__ import annotations

__version__ = "0.1.0"
