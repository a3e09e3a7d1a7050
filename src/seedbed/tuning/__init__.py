"""Search of hyperparameters: trials are runs of `seedbed train`, in processes of their own."""
