"""The control plane: configuration, engine loop, executors, Python API, command line. Never imports torch."""
