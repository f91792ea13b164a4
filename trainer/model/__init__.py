"""The two models: `target` is frozen and read, `draft` is trained, `attention` serves both."""
