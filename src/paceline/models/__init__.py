"""The embedded policies, folders of the user's own, and draft heads."""
