"""The errors that users see. Each message says what was expected, what came and what to do."""

_MAX_CHARACTERS = 800  # of a message, which may repeat a user's text


class KVCompressError(Exception):
    """Base class of this package's errors."""

    def __str__(self) -> str:
        """Returns the message, without the middle of a long one."""
        text = super().__str__()
        half = _MAX_CHARACTERS // 2
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


class ConfigError(KVCompressError, ValueError):
    """A setting, or a combination of settings, that cannot work. Raised before serving starts."""


class UnsupportedError(ConfigError):
    """A model or a vLLM option that this package does not compress (yet)."""


class EngineError(KVCompressError, RuntimeError):
    """An engine that this package started ended, or refused what it was asked."""


class FileError(KVCompressError, RuntimeError):
    """A file that a command needs cannot be read or written: the disk is full, for example."""


class InvariantError(KVCompressError, RuntimeError):
    """The bookkeeping does not balance: a bug in this package, never a user's mistake."""
