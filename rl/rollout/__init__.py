"""From a prompt to a finished group of rollouts, and the buffer between rollouts and training."""
