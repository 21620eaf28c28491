"""The training loop: one for synchronous and asynchronous runs."""
