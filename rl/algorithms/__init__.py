"""The mathematics of an algorithm: advantages and losses. Knows no worker, no Ray, no event loop."""
