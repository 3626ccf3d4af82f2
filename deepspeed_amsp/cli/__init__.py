"""Commands. Importing this package imports neither torch nor DeepSpeed: a command does, when it needs them."""
