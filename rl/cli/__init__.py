"""The `tandem` command: one file per subcommand."""
