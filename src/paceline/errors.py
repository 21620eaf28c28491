"""The errors paceline raises on purpose.

Every message says what is wrong, where, and what to do. The command line prints a `PacelineError` as one paragraph and
exits with code 2; anything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that a user can act on."""


class ConfigError(PacelineError, ValueError):
    """A recipe, an option or a combination of them that cannot work. Raised before anything expensive starts."""


class DataError(PacelineError, ValueError):
    """Prompts that cannot be used: none, empty, or longer than the limit."""


class ModelError(PacelineError, ValueError):
    """A model or draft folder that is missing, broken, or does not fit the policy."""


class EngineError(PacelineError, RuntimeError):
    """The engine answered something that cannot be right, or an assumption about its version does not hold."""


class PublishError(EngineError):
    """The weights the engine will use are not the weights that were published."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint that is incomplete, of another run, or could not be written."""


class LosslessError(PacelineError, RuntimeError):
    """The certificate's alarm fired: the tokens were not drawn from the policy's distribution."""
