"""What can go wrong, in one tree: each error knows its exit code, its code word for --json and, where there is one, a hint."""

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every command; the README's table is this enum."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    CONFIG = 3
    HOST = 4
    CONTAINER = 5
    GPU_BUSY = 6
    GPU_UNKNOWN = 7
    ENVIRONMENT = 8
    DIED_AT_START = 9
    RUN_NOT_FOUND = 10
    STOP_INCOMPLETE = 11
    TIMEOUT = 124
    INTERRUPTED = 130


class DflashctlError(Exception):
    """Base: `str(error)` is one sentence; `hint` says how to go on; `details` goes into the --json document."""

    exit_code = ExitCode.ENVIRONMENT
    code = "error"

    def __init__(self, message: str, *, hint: str | None = None, details: dict[str, object] | None = None) -> None:
        """Keep the sentence, the hint and what --json shows beside them."""
        super().__init__(message)
        self.hint = hint
        self.details = details or {}

    def document(self) -> dict[str, object]:
        """For --json."""
        return {"code": self.code, "message": str(self), "hint": self.hint}


class UsageError(DflashctlError):
    """Arguments that do not go together."""

    exit_code = ExitCode.USAGE
    code = "usage"


class ConfigurationError(DflashctlError):
    """hosts.yaml, an experiment or an override is wrong."""

    exit_code = ExitCode.CONFIG
    code = "config"


class HostError(DflashctlError):
    """The host cannot be reached, or its key is refused."""

    exit_code = ExitCode.HOST
    code = "host_unreachable"


class ContainerError(DflashctlError):
    """The container is not there, not running, or not ours to enter."""

    exit_code = ExitCode.CONTAINER
    code = "container"


class ContainerStoppedError(ContainerError):
    """The container is not running: whatever ran in it is gone."""


class GpuBusyError(DflashctlError):
    """GPUs are in use."""

    exit_code = ExitCode.GPU_BUSY
    code = "gpu_busy"


class GpuUnknownError(DflashctlError):
    """GPUs cannot be read, so nobody knows whether they are free."""

    exit_code = ExitCode.GPU_UNKNOWN
    code = "gpu_unknown"


class EnvironmentFault(DflashctlError):
    """The host lacks something: interpreter, torch, room, permission; or the code does not parse there."""

    exit_code = ExitCode.ENVIRONMENT
    code = "environment"


class BrokenAnswerError(EnvironmentFault):
    """The host's interpreter ended before it had answered, or answered something else."""

    code = "broken_answer"


class StartupDeath(DflashctlError):
    """The run ended inside its start-up window."""

    exit_code = ExitCode.DIED_AT_START
    code = "died_at_start"


class RetryRefused(DflashctlError):
    """The host takes no retry of a run: somebody has stopped it, or another run goes on from it already."""

    exit_code = ExitCode.RUN_FAILED
    code = "retry_refused"


class SmokeRefusal(DflashctlError):
    """A smoke run said no-go."""

    exit_code = ExitCode.RUN_FAILED
    code = "no_go"


class RunNotFoundError(DflashctlError):
    """No run of that name, or several."""

    exit_code = ExitCode.RUN_NOT_FOUND
    code = "run_not_found"


class StopIncompleteError(DflashctlError):
    """Processes of the run survived."""

    exit_code = ExitCode.STOP_INCOMPLETE
    code = "stop_incomplete"


class InterruptedByUser(DflashctlError):
    """Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED
    code = "interrupted"


class RemoteTimeoutError(DflashctlError):
    """The host did not answer in time."""

    exit_code = ExitCode.TIMEOUT
    code = "timeout"


class StdoutClosed(Exception):
    """Whoever read our output has had enough: no error of anybody's, unless more was to be done, which `exit_code` says."""

    def __init__(self, exit_code: ExitCode = ExitCode.OK) -> None:
        """Keep what the command ends with."""
        super().__init__()
        self.exit_code = exit_code


def fault(error: BaseException) -> DflashctlError:
    """What nobody has foreseen, as a sentence."""
    return DflashctlError(f"{type(error).__name__}: {error}", hint="a fault of dflashctl; DFLASHCTL_DEBUG=1 shows where")
