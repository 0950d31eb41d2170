"""The policy: its model, its optimizer, its training step and its checkpoint shards."""
