"""The errors a user can mend: one line, saying got / expected / what to do.

`openelm` prints the message on stderr and exits with `exit_status`; a library user catches `OpenELMError`.
Anything else that escapes is a bug of ours and keeps its traceback.
"""


class OpenELMError(Exception):
    """Base of every error that says what the user can change. Exit status 2."""

    exit_status = 2


class ConfigError(OpenELMError):
    """A configuration is missing, malformed, or disagrees with the tensors."""


class CheckpointError(OpenELMError):
    """A checkpoint cannot be read: missing, truncated, of an unknown kind, or refused for safety."""


class AdapterError(CheckpointError):
    """A model is expected, and the folder holds an adapter."""


class TokenizerError(OpenELMError):
    """A tokenizer is missing, is not the model's, or token ids fall outside the vocabulary."""


class HubError(OpenELMError):
    """The Hub refused, lacks, or could not deliver something."""


class GenerationError(OpenELMError):
    """A generation request cannot be met: context limit, empty prompt, contradictory settings."""


class DataError(OpenELMError):
    """Training data cannot be read, is of an unknown form, or has nothing to learn from."""


class OutputError(OpenELMError):
    """A target cannot be written: it exists, is not writable, or the disk is full."""


class RecordError(OpenELMError):
    """A file of measurements cannot be used: it is none, is damaged, or belongs to another machine or version."""


class RunFailedError(OpenELMError):
    """The work itself failed (non-finite values, a check that did not hold). Exit status 1."""

    exit_status = 1
