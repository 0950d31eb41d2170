"""Pure data and small mechanisms that every other package may import. Imports nothing of ours."""
