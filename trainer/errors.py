"""Errors that a user can mend, each one sentence: where, what, allowed, got.

Part of the contract between the command line and the trainer, so standard library only. Whatever is not one of these is a
fault of ours and is shown with its traceback.
"""


class TrainerError(Exception):
    """Base of all errors whose text alone tells the user what to do."""

    exit_code = 1


def sentence(error: BaseException) -> str:
    """What ended a run, as its last event says it; a signal's handler raises SystemExit."""
    match error:
        case TrainerError():
            return str(error)
        case KeyboardInterrupt():
            return "stopped by SIGINT"
        case SystemExit():
            return "stopped by SIGTERM"
    return f"{type(error).__name__}: {error}"


class ConfigError(TrainerError):
    """A value of the configuration is missing, unknown, of the wrong type or outside its range."""

    exit_code = 3


class DataError(TrainerError):
    """Token shards or conversations that cannot be trained on."""

    exit_code = 3


class TargetError(TrainerError):
    """The target model cannot be loaded, or is of a kind that is not supported."""

    exit_code = 3


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class NonFiniteError(TrainerError):
    """A loss or gradient became NaN or infinite; the step was not applied."""

    exit_code = 4


class WorkerError(TrainerError):
    """A worker thread died or hung; the text names the thread and its first cause."""
