"""Means to test an agent, a task or a runtime with; the package is imported with or without JAX.

| to test | use |
|---|---|
| an agent | `checks.check_agent`, then `trainers.Trainer` or `ReplayTrainer` in `probes` |
| a task on the device | `checks.check_task` |
| whatever moves transitions | `counting.CountingEnvironment` and `CountingChecker` |
"""
