"""Trainer of DFlash draft models: BatchPrefetcher -> TargetForwardLoop -> DrafterTrainLoop."""
