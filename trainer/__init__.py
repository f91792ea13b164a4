"""Trainer of DFlash draft models: BatchPrefetcher -> TargetForwardLoop -> DrafterTrainLoop."""

import os

# tqdm reads it when it is imported: loading a GGUF file draws a progress bar, which would fill a log
os.environ.setdefault("TQDM_DISABLE", "1")
