"""Where completions come from."""
