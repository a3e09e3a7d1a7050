"""Behaviour cloning: a policy that imitates recorded episodes, for a run to begin with."""
