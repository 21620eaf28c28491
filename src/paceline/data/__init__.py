"""Prompts: reasoning-gym tasks as token ids, and the order in which a run sees them."""
