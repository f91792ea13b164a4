"""Trainer of DFlash draft models: BatchPrefetcher -> TargetForwardLoop -> DrafterTrainLoop."""

import os
import sys
from types import TracebackType

# tqdm reads it when it is imported: loading a GGUF file draws a progress bar, which would fill a log
os.environ.setdefault("TQDM_DISABLE", "1")


def _stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C during the seconds in which a command imports torch, before its `main` can say so, is one word too."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("stopped\n")
    raise SystemExit(130)


if sys.argv[:1] == ["-m"]:  # as it is while `python -m trainer.x` looks for x: a program that imports us keeps its own hook
    sys.excepthook = _stopped
