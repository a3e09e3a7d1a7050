"""Tasks of DeepMind's dm_control (Tassa et al. 2018), with its own models, observations and rewards."""
