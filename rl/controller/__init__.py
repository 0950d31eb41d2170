"""The single controller: set-up, the step, the loop, validation, checkpoints."""
