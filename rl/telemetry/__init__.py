"""What a user sees: the console, metric sinks, traces."""
