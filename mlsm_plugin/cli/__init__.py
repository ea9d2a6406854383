"""The ``mlsm`` command: one module a subcommand, each thin over the folders above it."""
