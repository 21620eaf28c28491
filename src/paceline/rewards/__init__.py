"""Rewards: what a response is worth, scored in processes that can be killed."""
